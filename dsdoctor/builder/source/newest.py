"""Which DeepSpeed is the newest, and what kept a newer one from being taken: a constraint of pip's, or the offline cache."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from dsdoctor.core.host import LocalHost


def newest_sdist(sdists: Sequence[Path]) -> Path:
    """The one of the highest version; a pre-release only where there is no other. ``sdists`` holds at least one.

    >>> newest_sdist([Path("deepspeed-0.9.5.tar.gz"), Path("deepspeed-0.19.8.tar.gz"), Path("deepspeed-0.20.0rc1.tar.gz")]).name
    'deepspeed-0.19.8.tar.gz'
    """
    return max(sdists, key=lambda path: (not _version(path).is_prerelease, _version(path)))


def offline_limit(sdists: Sequence[Path]) -> str:
    """What --offline keeps from being known."""
    return f"the newest of {len(sdists)} in the cache; offline, no index was asked for a newer one"


def constraint_limit(host: LocalHost) -> str:
    """The constraint of DeepSpeed in the files that PIP_CONSTRAINT names, as a reason; "" where there is none."""
    for name in _files(host.variable("PIP_CONSTRAINT") or ""):
        for line in (host.read(name) or "").splitlines():
            specifier = _of_deepspeed(line)
            if specifier:
                return f"the newest that {name} (PIP_CONSTRAINT) allows: deepspeed{specifier}"
    return ""


def _files(variable: str) -> list[str]:
    """pip takes several, with blanks between them."""
    try:
        return shlex.split(variable)
    except ValueError:
        return [variable]


def _of_deepspeed(line: str) -> str:
    """The versions that a line of a constraints file allows DeepSpeed; "" for a line about something else.

    >>> _of_deepspeed("deepspeed == 0.19.8 ; python_version >= '3.10'  # why"), _of_deepspeed("deepspeed-kernels==1.0")
    ('==0.19.8', '')
    """
    try:
        wanted = Requirement(re.sub(r"(^|\s)#.*$", "", line).strip())
    except InvalidRequirement:
        return ""
    holds = wanted.marker is None or wanted.marker.evaluate()
    return str(wanted.specifier) if wanted.name.lower() == "deepspeed" and holds else ""


def _version(path: Path) -> Version:
    try:
        return Version(path.name.removeprefix("deepspeed-").removesuffix(".tar.gz"))
    except InvalidVersion:
        return Version("0")
