"""The DeepSpeed wheels of folders and package indexes, each held against one machine. Nothing of them is run."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import InvalidVersion, Version

from dsdoctor.builder.wheel.attested import judge_attestations
from dsdoctor.builder.wheel.index import wheels_of
from dsdoctor.builder.wheel.read import read_wheel
from dsdoctor.builder.wheel.remote import RemoteWheel, facts_of_name, fetch, is_url, list_index, open_session
from dsdoctor.commands.judge import judge
from dsdoctor.core import redaction
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.finding import Finding, Severity, has_error, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed, Machine
from dsdoctor.probe.observe import Observation, Say

Shelved = Path | RemoteWheel
"""A wheel in a folder, or one that an index lists."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A wheel and what was found against it; ``built`` is None where it could not be read."""

    wheel: str
    built: DeepSpeed | None
    findings: tuple[Finding, ...]
    sha256: str | None = None
    """Of one that was fetched: what pip is to be bound to."""

    @property
    def fits(self) -> bool:
        """Whether nothing stands in its way."""
        return not has_error(self.findings)


class Shelf:
    """The wheels of folders and indexes, held against one machine one by one.

    A wheel of an index whose name says that it does not fit is not fetched; the others are, into a folder that goes away.
    """

    def __init__(self, places: Sequence[str], observation: Observation, python: str, *, say: Say) -> None:
        """Raises UsageError for a place without DeepSpeed wheels, BuildFailed for an index that cannot be read."""
        self._observation, self._python, self._say = observation, python, say
        self._session = open_session(LocalHost())
        found = {wheel.name: wheel for place in reversed(places) for wheel in self._of(place)}
        self.wheels: tuple[Shelved, ...] = tuple(sorted(found.values(), key=_age, reverse=True))
        self._folder = TemporaryDirectory(prefix="dsdoctor-")

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
        self._session.close()

    def ranked(self, ops: tuple[str, ...]) -> tuple[Candidate, ...]:
        """All of them, the best first. Raises UsageError where there is none."""
        if not self.wheels:
            raise UsageError("the index lists no wheel of deepspeed", hint="name another index, or a folder of wheels")
        return tuple(sorted((self.judge(wheel, ops)[0] for wheel in self.wheels), key=_worth, reverse=True))

    def judge(self, wheel: Shelved, ops: tuple[str, ...]) -> tuple[Candidate, Path | None]:
        """A wheel against the machine and the ops that it must hold, and its file; None where it was not fetched."""
        if isinstance(wheel, Path):
            return self._judged(wheel, str(wheel), ops), wheel
        by_name = self._judged_by_name(wheel)
        if not by_name.fits:
            return by_name, None
        try:
            path, digest = fetch(wheel, Path(self._folder.name), self._session, say=self._say)
        except BuildFailed as error:
            return replace(by_name, findings=(Finding.error("wheel-not-fetched", error.message, fix=error.hint),)), None
        return replace(self._judged(path, wheel.shown, ops), sha256=digest), path

    def _of(self, place: str) -> tuple[Shelved, ...]:
        if is_url(place):
            return list_index(place, self._session)
        if re.match(r"[A-Za-z][\w+.-]*:/", place) and not place.startswith("file://"):
            named = redaction.urls(re.sub(r":/+", "://", place, count=1))
            raise UsageError(
                f"{named} is no address of an index", hint="name one with https:// or http://, or a folder"
            )
        folder = Path(place.removeprefix("file://"))
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder", hint="name the folder of the wheels, or of an index")
        if not (wheels := wheels_of(folder)):
            raise UsageError(
                f"no deepspeed-*.whl lies in {folder}",
                hint=step("python -m dsdoctor build-wheel --out {folder}", folder=str(folder)).line,
            )
        return wheels

    def _judged_by_name(self, wheel: RemoteWheel) -> Candidate:
        """What a name says is held against the machine as what is in a wheel would be."""
        named = facts_of_name(wheel.name)
        if named is None:
            return Candidate(
                wheel=wheel.shown, built=None, findings=(Finding.error("usage", f"{wheel.name} is no wheel"),)
            )
        findings = judge(self._observation, named, self._python).findings
        against = tuple(finding for finding in findings if finding.severity is Severity.ERROR)
        against = (*against, *_other_name(named, self._observation.machine))
        if wheel.yanked:
            against = (
                *against,
                Finding.error("wheel-yanked", f"{wheel.name} was yanked: whoever made it took it back"),
            )
        return Candidate(wheel=wheel.shown, built=named, findings=against)

    def _judged(self, path: Path, shown: str, ops: tuple[str, ...]) -> Candidate:
        try:
            built = replace(read_wheel(path), location=shown)
        except UsageError as error:
            return Candidate(wheel=shown, built=None, findings=(Finding.error("usage", error.message),))
        lacking = tuple(op for op in ops if op not in built.installed_ops)
        lacks = _lacks(lacking, built) if lacking else ()
        findings = (*judge(self._observation, built, self._python).findings, *judge_attestations(path), *lacks)
        return Candidate(wheel=shown, built=built, findings=findings)


def version_of(wheel: Shelved) -> Version:
    """The public version that a wheel's name says, 0 for a name that says none."""
    named = facts_of_name(wheel.name)
    try:
        return Version(Version(named.version).public) if named else Version("0")
    except InvalidVersion:
        return Version("0")


def _age(wheel: Shelved) -> tuple[Version, bool, str]:
    """Greater for a newer one; among those of a version, for one whose name says for which torch it is."""
    named = facts_of_name(wheel.name)
    return version_of(wheel), named is not None and named.torch is not None, wheel.name


def _other_name(named: DeepSpeed, machine: Machine) -> Iterator[Finding]:
    """What a wheel's name says against its use with the torch that is here."""
    torch = machine.torch
    if torch and named.torch and named.torch != torch.minor:
        title = f"its name says torch {named.torch}, here is torch {torch.version}: it was not fetched"
        yield Finding.error("wheel-name-mismatch", title)
    if torch and named.cuda and named.cuda != str(torch.cuda):
        has = f"is built for CUDA {torch.cuda}" if torch.cuda else "is a CPU build"
        title = f"its name says CUDA {named.cuda}, torch {torch.version} {has}: it was not fetched"
        yield Finding.error("wheel-name-mismatch", title)


def _lacks(ops: tuple[str, ...], built: DeepSpeed) -> tuple[Finding, ...]:
    holds = ", ".join(built.installed_ops) or "no op"
    title = f"{', '.join(ops)} was asked for, and the wheel holds {holds}"
    return (Finding.error("op-not-in-wheel", title, affects=ops),)


def _worth(candidate: Candidate) -> tuple[bool, Version, int, int, str]:
    built = candidate.built
    doubts = sum(finding.severity is Severity.WARNING for finding in candidate.findings)
    version = Version(built.version) if built else Version("0")
    return candidate.fits, Version(version.public), len(built.installed_ops) if built else 0, -doubts, candidate.wheel
