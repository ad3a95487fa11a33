"""The group of commands that look after what is kept on this machine."""

import time
from typing import Annotated, Any

from cyclopts import App

from dsdoctor.builder.cache.folders import (
    damage,
    folder_lines,
    kept,
    kept_lines,
    prune,
    prune_folders,
    pruned_lines,
    store_findings,
    stored_folders,
    trusted_store,
    verified_line,
)
from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.statuses import OF_GROUP, UNABLE, statuses_line, statuses_of
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.options import flag, option
from dsdoctor.core.workspace import cache_folder
from dsdoctor.ui.terminal import Stream, finding_lines, show

app = App(
    name="cache",
    version_flags=[],
    help_epilogue=OF_GROUP,
    help="""Manage the cache of compiled ops and finished wheels.

    The cache is $DSDOCTOR_CACHE/compiled, else ~/.cache/dsdoctor/compiled. It
    stays below $DSDOCTOR_CACHE_LIMIT (10G) by removing the least recently used
    entries. You can use it while a build runs, and delete the folder at any time.

    dsdoctor cache ls

    dsdoctor cache prune --max-size 2G --older-than 30d

    dsdoctor cache verify
    """,
)


def ls_command(*, as_json: Json = False) -> None:
    """List cached entries, most recently used first, and the total size against the limit.

    Example: dsdoctor cache ls
    """
    store = trusted_store(LocalHost())
    cache = cache_folder(LocalHost())
    entries, folders = kept(store.entries()), stored_folders(cache)
    lines = kept_lines(entries, str(store.folder), store.limit, time.time())
    others = folder_lines(folders, str(cache), time.time())
    total, findings = sum(entry.size for entry in entries), _shown_findings(store)
    parts = {**_place(store), "size": total, "entries": entries, "folders": folders}
    print_result("cache ls", as_json, (*lines, *others), findings, **parts)


def prune_command(
    *,
    max_size: Annotated[
        str | None,
        option(name="--max-size", metavar="SIZE", help='Remove the least recently used entries until "2G" are left.'),
    ] = None,
    older_than: Annotated[
        str | None, option(name="--older-than", metavar="AGE", help='Remove entries not used for "30d".')
    ] = None,
    everything: Annotated[bool, flag(name="--all", help="Remove everything.")] = False,
    as_json: Json = False,
) -> int:
    """Remove entries that were not used recently, and list them. Without options: compiled ops and wheels, down to the limit.

    The options also apply to assembled toolkits, DeepSpeed's archives and target environments. Those used in the last two
    hours are kept, except with --all.

    Example: dsdoctor cache prune --max-size 2G --older-than 30d
    """
    store = trusted_store(LocalHost())
    cache = cache_folder(LocalHost())
    removed = kept(prune(store, size=max_size, age=older_than, everything=everything))
    left = sum(entry.size for entry in store.entries())
    folders = prune_folders(cache, size=max_size, age=older_than, everything=everything, room=left)
    all_left = left + sum(entry.size for entry in stored_folders(cache))
    lines = pruned_lines((*removed, *folders), all_left, time.time())
    parts = {**_place(store), "size": left, "removed": removed, "folders": folders}
    print_result("cache prune", as_json, lines, _shown_findings(store), **parts)
    return UNABLE if store.complaints else OK


def verify_command(*, as_json: Json = False) -> int:
    """Read every cached byte and remove damaged entries.

    Example: dsdoctor cache verify
    """
    store = trusted_store(LocalHost())
    findings = tuple(damage(entry, why) for entry, why in store.verify())
    whole = sum(1 for _ in store.entries())
    lines = (*finding_lines(findings), verified_line(whole))
    print_result("cache verify", as_json, lines, findings, **_place(store), whole=whole)
    return FOUND if findings else OK


def _place(store: CacheStore) -> dict[str, Any]:
    return {"folder": str(store.folder), "limit": store.limit}


def _shown_findings(store: CacheStore) -> tuple[Finding, ...]:
    """The findings about the store, shown: an entry that is damaged is gone with the first look at it."""
    findings = store_findings(store)
    show(Stream(stderr=True), finding_lines(findings))
    return findings


app.command(ls_command, name="ls", help_epilogue=statuses_line(statuses_of("cache ls")))
app.command(prune_command, name="prune", help_epilogue=statuses_line(statuses_of("cache prune")))
app.command(verify_command, name="verify", help_epilogue=statuses_line(statuses_of("cache verify")))
