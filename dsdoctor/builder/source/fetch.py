"""What --source names -> a temporary copy of the DeepSpeed tree, ready to be described and built.

A folder is copied and never written to; an sdist is unpacked; a version is fetched by pip and a git URL by git.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.source.newest import constraint_limit, offline_limit
from dsdoctor.builder.source.sdists import NEWEST, fetch_sdist, sha256_of
from dsdoctor.builder.source.unpack import unpack
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.pip import failed_fetch, why_failed
from dsdoctor.core.redaction import urls

FETCH_LIMIT = 1800.0
GIT_ADDRESS = re.compile(r"(?:https?|ssh|git|file)://[^-\s]|[A-Za-z0-9_.][\w.-]*@[A-Za-z0-9_.][\w.-]*:")
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", "build", "dist", "*.egg-info", "__pycache__", "*.pyc", "*.cpython-*.so", "git_version_info_installed.py"
)
"""What an earlier build leaves in a tree, and must not get into this build."""


def spell_source(request: str | None, installed: DeepSpeed | None) -> tuple[str, str]:
    """What to build and why: what --source names, else the installed DeepSpeed's version, else the newest release."""
    if request:
        return request, "--source"
    if installed is not None:
        public = installed.version.split("+")[0]
        if re.fullmatch(r"\d+(\.\d+)+(rc\d+|\.post\d+)?", public):
            return public, f"DeepSpeed {installed.version} is installed here"
    return NEWEST, "the newest release"


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A tree in its temporary folder. ``asked`` is what was asked for, without any password; ``commit`` is None where unknown.

    ``limit``: what may have kept a newer release than this one from being taken, where the newest was asked for.
    """

    folder: Path
    asked: str
    commit: str | None
    because: str = ""
    limit: str = ""


def lay_out(host: LocalHost, spec: str, folder: Path, *, cache: Path, python: str, offline: bool) -> LaidOut:
    """Put the tree of ``spec`` into ``folder`` (which must not exist).

    Raises UsageError for what is not a DeepSpeed source, BuildFailed for a fetch that fails.
    """
    place = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    commit = None
    if spec.startswith("git+"):
        commit = _clone(host, spec.removeprefix("git+"), folder, offline=offline)
    elif place.is_dir():
        commit = _commit(host, place)
        shutil.copytree(place, folder, symlinks=True, ignore=LEFT_BEHIND)
    elif place.is_file():
        unpack(place, folder)
    elif spec == NEWEST or re.fullmatch(r"\d+(\.\w+)*", spec):
        unpack(fetch_sdist(host, spec, cache=cache, python=python, offline=offline), folder)
    else:
        raise UsageError(
            f"--source {urls(spec)!r} is not a folder, a file, a version or a git+https URL",
            hint="--source ~/DeepSpeed, --source deepspeed-0.19.8.tar.gz, --source 0.19.8 or --source git+https://...",
        )
    for needed in ("setup.py", "version.txt", "op_builder/all_ops.py"):
        if not (folder / needed).is_file():
            raise UsageError(
                f"{urls(spec)} is not a DeepSpeed source: it has no {needed}", hint="name the folder that holds it"
            )
    limit = newest_limit(host, cache, offline=offline) if spec == NEWEST else ""
    return LaidOut(folder=folder, asked=urls(spec), commit=commit, limit=limit)


def digest(folder: Path) -> str:
    """The sha256 over the sorted relative names, file modes and contents of a tree; of a link, over the text of its target."""
    total = hashlib.sha256()
    for path in sorted(_files(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            kind, content = b"l", os.fsencode(path.readlink())
        else:
            kind, content = b"x" if os.access(path, os.X_OK) else b"f", path.read_bytes()
        total.update(b"%s %d %b\n" % (kind, len(content), name.encode()))
        total.update(content)
    return total.hexdigest()


def digest_here(host: LocalHost, spec: str | None, installed: DeepSpeed | None, cache: Path) -> str | None:
    """What identifies a source without copying it; None for one that would have to be fetched first."""
    wanted, _ = spell_source(spec, installed)
    place = Path(os.path.expanduser(wanted))  # noqa: PTH111
    if place.is_dir():
        # files behind a link that leads out of the tree are not part of its digest
        inside = os.path.realpath(place) + "/"
        outward = any(path.is_symlink() and not os.path.realpath(path).startswith(inside) for path in place.rglob("*"))
        return None if outward else f"{digest(place)} {_commit(host, place)}"
    sdist = place if place.is_file() else cache / "sdists" / f"deepspeed-{wanted}.tar.gz"
    return sha256_of(sdist) if sdist.is_file() else None


def newest_limit(host: LocalHost, cache: Path, *, offline: bool) -> str:
    """What keeps "newest" from being the newest there is; "" where nothing is known to."""
    return offline_limit([*(cache / "sdists").glob("deepspeed-*.tar.gz")]) if offline else constraint_limit(host)


def _clone(host: LocalHost, url: str, folder: Path, *, offline: bool) -> str | None:
    if offline and not url.startswith("file:"):
        raise UsageError(f"{urls(url)} cannot be fetched with --offline", hint="name a folder or a file with --source")
    address, _, reference = url.rpartition("@") if "@" in url.rpartition("/")[2] else (url, "", "")
    if not GIT_ADDRESS.match(address) or reference.startswith("-"):
        raise UsageError(
            f"{urls(url)} is no address that git is asked for",
            hint="name one as in: --source git+https://host/DeepSpeed@main",
        )
    folder.mkdir(parents=True)
    child = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}
    for step in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth", "1", "--", address, reference or "HEAD"],
        ["checkout", "--quiet", "FETCH_HEAD"],
    ):
        answer = host.run(["git", "-C", str(folder), *step], timeout=FETCH_LIMIT, env=child)
        if not answer.ok:
            message = f"git could not fetch {urls(url)}: {why_failed(host, answer.stderr)}"
            raise failed_fetch(message, answer.stderr, "check the address and the branch, tag or commit after '@'")
    return _commit(host, folder)


def _commit(host: LocalHost, folder: Path) -> str | None:
    """The commit of a git work tree; None for a folder that is not the top of one."""
    answer = host.run(["git", "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD"], timeout=20)
    lines = answer.stdout.splitlines()
    return lines[1] if answer.ok and len(lines) == 2 and Path(lines[0]) == folder.resolve() else None


def _files(folder: Path) -> Iterable[Path]:
    skipped = {".git", "__pycache__"}
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return (path for path in found if not skipped.intersection(path.relative_to(folder).parts))
