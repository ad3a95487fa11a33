"""Built wheels against a machine: one, all of a folder or an index, and the best of them.

Nothing of a wheel is run; only ``verify`` with ``load`` imports the ops that are installed.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from dsdoctor.builder.wheel.index import (
    Digests,
    RemoteWheel,
    contradicted_digest,
    facts_of_name,
    fetch,
    is_url,
    list_index,
    listed_digests,
    open_session,
    wheels_of,
)
from dsdoctor.builder.wheel.read import read_installed, read_wheel
from dsdoctor.builder.wheel.shared_object import load_installed
from dsdoctor.checks import TOPICS, examine, rule_of
from dsdoctor.core import redaction
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.finding import Finding, Severity, for_python, has_error, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed, Machine
from dsdoctor.core.workspace import temporary_folder
from dsdoctor.probe.observe import Observation, Say, observe
from dsdoctor.rules import book

RUNS = ("python-silent", "torch-missing", "torch-broken")
"""What keeps every built DeepSpeed from running."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for a built DeepSpeed: its facts, and what was found against the machine."""

    machine: Machine
    built: DeepSpeed
    findings: tuple[Finding, ...]


def judge(observation: Observation, built: DeepSpeed, python: str) -> Verified:
    """A built DeepSpeed against what was seen of a machine."""
    with_built = replace(observation.machine, deepspeed=built)
    of_built = next(topic.checks for topic in TOPICS if topic.name == "deepspeed")
    rules = frozenset({*RUNS, *map(rule_of, of_built)})
    found = examine(with_built, topics=TOPICS, rules=rules)
    findings = tuple(_of_ops(finding, built) for topic in found for finding in topic.findings)
    findings = (*findings, *_for_whom(with_built, built))
    if observation.is_here and python != sys.executable:
        findings = tuple(for_python(finding, python) for finding in findings)
    return Verified(machine=with_built, built=built, findings=findings)


def _for_whom(machine: Machine, built: DeepSpeed) -> Iterator[Finding]:
    """What "it fits" does not say: an accelerator that is not judged, and that no op is inside."""
    if machine.unjudged_accelerator:
        why = machine.unjudged_accelerator
        yield book.finding("ops-not-judged", Severity.WARNING, case="accelerator", why=why)
    elif not built.installed_ops:
        yield book.finding("wheel-without-ops", Severity.NOTE, version=built.version)


def _of_ops(finding: Finding, built: DeepSpeed) -> Finding:
    """The finding with the ops that it affects: those it names, else all."""
    named = tuple(op for op in finding.affects if op in built.installed_ops)
    return replace(finding, affects=named or (built.installed_ops if finding.affects else ()))


ListedWheel = Path | RemoteWheel
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


class WheelCandidates:
    """The wheels of folders and indexes, held against one machine one by one.

    A wheel of an index whose name says that it does not fit is not fetched; the others are, into a folder that goes away.
    """

    def __init__(self, places: Sequence[str], observation: Observation, python: str, *, say: Say) -> None:
        """Raises UsageError for a place without DeepSpeed wheels, BuildFailed for an index that cannot be read."""
        self._observation, self._python, self._say = observation, python, say
        self._session = open_session(LocalHost())
        found = {wheel.name: wheel for place in reversed(places) for wheel in self._of(place)}
        self.wheels: tuple[ListedWheel, ...] = tuple(sorted(found.values(), key=_age, reverse=True))
        self._listed: dict[Path, Mapping[str, Digests]] = {}
        self._kept = ExitStack()
        self._folder = self._kept.enter_context(temporary_folder())

    def __enter__(self) -> "WheelCandidates":
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        self._session.close()

    def ranked(self, ops: tuple[str, ...]) -> tuple[Candidate, ...]:
        """All of them, the best first. Raises UsageError where there is none."""
        if not self.wheels:
            raise UsageError("the index has no DeepSpeed wheels", hint="name another index, or a folder of wheels")
        return tuple(sorted((self.judge(wheel, ops)[0] for wheel in self.wheels), key=_worth, reverse=True))

    def judge(self, wheel: ListedWheel, ops: tuple[str, ...]) -> tuple[Candidate, Path | None]:
        """A wheel against the machine and the ops that it must hold, and its file; None where it was not fetched."""
        if isinstance(wheel, Path):
            judged = self._judged(wheel, str(wheel), ops)
            listing = self._listing(wheel) if judged.built is not None else ()
            return replace(judged, findings=(*listing, *judged.findings)), wheel
        by_name = self._judged_by_name(wheel)
        if not by_name.fits:
            return by_name, None
        try:
            path, digest = fetch(wheel, self._folder, self._session, say=self._say)
        except BuildFailed as error:
            failed = book.finding(
                "wheel-not-fetched", Severity.ERROR, case="failed", why=error.message, hint=error.hint
            )
            return replace(by_name, findings=(failed,)), None
        return replace(self._judged(path, wheel.shown, ops), sha256=digest), path

    def _of(self, place: str) -> tuple[ListedWheel, ...]:
        if is_url(place):
            return list_index(place, self._session)
        if re.match(r"[A-Za-z][\w+.-]*:/", place) and not place.startswith("file://"):
            named = redaction.urls(re.sub(r":/+", "://", place, count=1))
            raise UsageError(
                f"{named} is not the address of an index", hint="name one with https:// or http://, or a folder"
            )
        folder = Path(place.removeprefix("file://"))
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", hint="name the folder of the wheels, or of an index")
        if not (wheels := wheels_of(folder)):
            raise UsageError(
                f"there is no deepspeed-*.whl in {folder}",
                hint=step("python -m dsdoctor build-wheel --out {folder}", folder=str(folder)).line,
            )
        return wheels

    def _judged_by_name(self, wheel: RemoteWheel) -> Candidate:
        """What a name says is held against the machine as what is in a wheel would be."""
        named = facts_of_name(wheel.name)
        if named is None:
            no_wheel = book.finding("usage", Severity.ERROR, case="no-wheel", wheel=wheel.name)
            return Candidate(wheel=wheel.shown, built=None, findings=(no_wheel,))
        findings = judge(self._observation, named, self._python).findings
        against = tuple(finding for finding in findings if finding.severity is Severity.ERROR)
        against = (*against, *_other_name(named, self._observation.machine))
        if wheel.yanked:
            against = (*against, book.finding("wheel-yanked", Severity.ERROR, wheel=wheel.name))
        return Candidate(wheel=wheel.shown, built=named, findings=against)

    def _listing(self, wheel: Path) -> tuple[Finding, ...]:
        """What the page of the wheel's folder says against it."""
        if wheel.parent not in self._listed:
            self._listed[wheel.parent] = listed_digests(wheel.parent)
        return judge_listing(wheel, self._listed[wheel.parent])

    def _judged(self, path: Path, shown: str, ops: tuple[str, ...]) -> Candidate:
        try:
            built = replace(read_wheel(path), location=shown)
        except UsageError as error:
            unreadable = book.finding("usage", Severity.ERROR, case="unreadable", why=error.message)
            return Candidate(wheel=shown, built=None, findings=(unreadable,))
        lacking = tuple(op for op in ops if op not in built.installed_ops)
        lacks = _lacks(lacking, built) if lacking else ()
        findings = (*judge(self._observation, built, self._python).findings, *lacks)
        return Candidate(wheel=shown, built=built, findings=findings)


def judge_listing(wheel: Path, listed: Mapping[str, Digests]) -> tuple[Finding, ...]:
    """An error where a wheel is not the file that the index in its folder lists."""
    other = contradicted_digest(wheel, listed.get(wheel.name, ()))
    if not other:
        return ()
    return (book.finding("wheel-not-fetched", Severity.ERROR, case="changed", wheel=wheel.name, difference=other),)


def version_of(wheel: ListedWheel) -> Version:
    """The public version that a wheel's name says, 0 for a name that says none."""
    named = facts_of_name(wheel.name)
    return _public(named.version if named else "0")


def _public(version: str) -> Version:
    try:
        return Version(Version(version).public)
    except ValueError:
        return Version("0")


def _age(wheel: ListedWheel) -> tuple[Version, bool, str]:
    """Greater for a newer one; among those of a version, for one whose name says for which torch it is."""
    named = facts_of_name(wheel.name)
    return version_of(wheel), named is not None and named.torch is not None, wheel.name


def _other_name(named: DeepSpeed, machine: Machine) -> Iterator[Finding]:
    """What a wheel's name says against its use with the torch that is here."""
    torch = machine.torch
    if torch and named.torch and named.torch != torch.minor:
        yield book.finding("wheel-name-mismatch", Severity.ERROR, case="torch", named=named.torch, torch=torch.version)
    if torch and named.cuda and named.cuda != str(torch.cuda):
        yield book.finding(
            "wheel-name-mismatch",
            Severity.ERROR,
            case="cuda",
            named=named.cuda,
            torch=torch.version,
            build=f"built for CUDA {torch.cuda}" if torch.cuda else torch.build,
        )


def _lacks(ops: tuple[str, ...], built: DeepSpeed) -> tuple[Finding, ...]:
    holds = built.installed_ops or None
    return (book.finding("op-not-in-wheel", Severity.ERROR, case="lacking", affects=ops, ops=ops, holds=holds),)


def _worth(candidate: Candidate) -> tuple[bool, Version, int, int, str]:
    built = candidate.built
    doubts = sum(finding.severity is Severity.WARNING for finding in candidate.findings)
    return (
        candidate.fits,
        _public(built.version if built else "0"),
        len(built.installed_ops) if built else 0,
        -doubts,
        candidate.wheel,
    )


def verify(python: str, machine: Path | None, wheel: Path | None, *, load: bool = False) -> Verified:
    """Judge a wheel, or (None) the installed DeepSpeed, against a machine. Raises UsageError for what is no such wheel.

    ``load`` tries the installed ops too: the one thing here that runs them.
    """
    if load and (wheel is not None or machine is not None):
        raise UsageError(
            "--load needs the DeepSpeed that is installed here", hint="dsdoctor wheel verify --installed --load"
        )
    # a file that is not a wheel is refused before the machine is asked
    read = read_wheel(wheel) if wheel is not None else None
    observation = observe(python, machine, whole=False)
    built = read or _installed(observation)
    judged = judge(observation, built, python)
    if wheel is not None:
        listing = judge_listing(wheel, listed_digests(wheel.absolute().parent))
        return replace(judged, findings=(*listing, *judged.findings))
    if load and not has_error(judged.findings):
        asked = judged.machine.python.executable if judged.machine.python else python
        loaded = load_installed(LocalHost(), asked, built, judged.machine)
        return replace(judged, findings=judged.findings + loaded)
    return judged


def verify_listed(python: str, machine: Path | None, url: str, *, say: Say) -> Verified:
    """Judge the wheel that an address names, or of an index the one that fits best. Raises UsageError where none can be judged."""
    observation = observe(python, machine, whole=False)
    with WheelCandidates([url], observation, python, say=say) as candidates:
        best = candidates.ranked(())[0]
    if best.built is None:
        raise UsageError(f"{best.wheel}: {best.findings[0].title}", hint="name another wheel")
    machine_with = replace(observation.machine, deepspeed=best.built)
    return Verified(machine=machine_with, built=best.built, findings=best.findings)


def _installed(observation: Observation) -> DeepSpeed:
    """The installed DeepSpeed with what its files say, where they are at hand."""
    installed = observation.machine.deepspeed
    if installed is None:
        raise UsageError(
            "DeepSpeed is not installed in that environment",
            hint="name a wheel, or another environment with --python PATH",
        )
    return read_installed(installed) if observation.is_here else installed


def pick(python: str, machine: Path | None, place: str, ops: tuple[str, ...], *, say: Say) -> tuple[Candidate, ...]:
    """Every wheel of a folder or an index, the best first: one that fits, then the newest, then the one with most ops.

    One that lacks an op of ``ops`` does not fit. Raises UsageError for a place without DeepSpeed wheels.
    """
    with WheelCandidates([place], observe(python, machine, whole=False), python, say=say) as candidates:
        return candidates.ranked(ops)


FOR_WHOM = {"ops-not-judged", "wheel-without-ops"}


def built_lines(built: DeepSpeed) -> Iterator[str]:
    """What a wheel or an installed DeepSpeed says of itself."""
    yield f"DeepSpeed {built.version} in {built.location}"
    made = [("for", ", ".join((*built.python, *built.platform))), ("accelerator", built.accelerator)]
    made += [("torch", built.torch), ("CUDA", built.cuda), ("glibc", built.glibc), ("libstdc++", built.glibcxx)]
    yield "    " + ", ".join(f"{name} {value}" for name, value in made if value)
    yield f"    ops: {', '.join(built.present_ops or built.installed_ops) or 'none'}"
    inside = sorted({name for names in built.sm_arch.values() for name in names})
    if inside:
        yield f"    GPU code: {', '.join(inside)}"
    march = [flag for flag in built.cpu_flags if flag.startswith(("-march", "-mcpu"))]
    if march:
        yield f"    processor code: {' '.join(march)}"


def candidate_lines(found: Iterable[tuple[str, bool, tuple[Finding, ...]]], install: str | None) -> Iterator[str]:
    """One line for each wheel, the best first, with what stands in the way; then the command that installs the best."""
    for number, (wheel, fits, findings) in enumerate(found):
        unjudged = any(finding.rule == "ops-not-judged" for finding in findings)
        titles = [
            finding.title for finding in findings if finding.severity is Severity.ERROR or finding.rule in FOR_WHOM
        ]
        mark = ("!" if unjudged else "✓") if fits and number == 0 else " " if fits else "✗"
        yield f"{mark} {wheel.rpartition('/')[2]}"
        yield from (f"    {title}" for title in titles)
    yield f"$ {install}" if install else "✗ none fits this machine"
