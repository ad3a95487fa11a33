"""What can be put right for certain: ``latest``, and a newest tag that is not complete. Decides; changes nothing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsdoctor.checkpoint.look import Folder, TagFolder

ASIDE = ".incomplete"
QUIET = 600.0
"""Seconds: a tag of which a file was written later may still be in the making."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """``latest``: what the file is to say, None where it stays. ``aside``: tags that get another name. ``left``: why not more."""

    latest: str | None = None
    aside: tuple[str, ...] = ()
    left: str = ""


def repair_of(folder: Folder, complete: Mapping[str, bool], *, now: float) -> Repair:
    """What is to be done. ``complete``: for each tag that is not universal whether every file of it is there and whole."""
    tags = sorted((tag for tag in folder.tags if tag.name in complete and not _is_aside(tag)), key=_age)
    whole = [tag for tag in tags if complete[tag.name]]
    if not whole:
        return Repair(left="no tag is complete")
    newest = whole[-1]
    broken = [tag for tag in tags if not complete[tag.name] and _age(tag) > _age(newest)]
    fresh = [tag.name for tag in broken if now - tag.modified < QUIET]
    if fresh:
        return Repair(
            left=f"{fresh[0]} was written less than {QUIET / 60:.0f} minutes ago and may still be in the making "
            "(of a fresh copy too: cp -a and rsync -t keep the times)"
        )
    named = complete.get(folder.latest) if folder.latest is not None else None
    return Repair(latest=None if named else newest.name, aside=tuple(tag.name for tag in broken))


def _age(tag: TagFolder) -> tuple[int, float]:
    """Tags in order: by the step in the name, then by when they were written."""
    return (-1 if tag.step is None else tag.step, tag.modified)


def _is_aside(tag: TagFolder) -> bool:
    return re.search(rf"{re.escape(ASIDE)}(-\d+)?$", tag.name) is not None


def free_name(name: str, taken: frozenset[str]) -> str:
    """The name for a tag that is set aside.

    >>> free_name("global_step4", frozenset({"global_step4.incomplete"}))
    'global_step4.incomplete-2'
    """
    wanted, number = f"{name}{ASIDE}", 2
    while wanted in taken:
        wanted, number = f"{name}{ASIDE}-{number}", number + 1
    return wanted
