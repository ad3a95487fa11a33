"""pick: the wheels of a folder or an index against one machine -> the one that fits it best. Runs nothing of them."""

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from dsdoctor.builder.wheel.attested import judge_attestations
from dsdoctor.builder.wheel.index import wheels_of
from dsdoctor.builder.wheel.read import read_wheel
from dsdoctor.commands.observe import Observation, observe
from dsdoctor.commands.verify import judge
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.fix import step
from dsdoctor.core.machine import DeepSpeed


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A wheel and what was found against it; ``built`` is None where it could not be read."""

    wheel: str
    built: DeepSpeed | None
    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing stands in its way."""
        return not has_error(self.findings)


def pick(python: str, machine: Path | None, folder: Path, ops: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Every wheel of a folder or an index, the best first: one that fits, then the newest, then the one with most ops.

    One that lacks an op of ``ops`` does not fit. Raises UsageError for a folder without DeepSpeed wheels.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", hint="name the folder of the wheels, or of an index")
    wheels = wheels_of(folder)
    if not wheels:
        raise UsageError(
            f"no deepspeed-*.whl lies in {folder}",
            hint=step("python -m dsdoctor build-wheel --out {folder}", folder=str(folder)).line,
        )
    observation = observe(python, machine, whole=False)
    return tuple(sorted((_candidate(observation, wheel, python, ops) for wheel in wheels), key=_worth, reverse=True))


def _candidate(observation: Observation, wheel: Path, python: str, ops: tuple[str, ...]) -> Candidate:
    try:
        built = read_wheel(wheel)
    except UsageError as error:
        return Candidate(wheel=str(wheel), built=None, findings=(Finding.error("usage", error.message),))
    lacking = tuple(op for op in ops if op not in built.installed_ops)
    lacks = _lacks(lacking, built) if lacking else ()
    found = (*judge(observation, built, python).findings, *judge_attestations(wheel), *lacks)
    return Candidate(wheel=str(wheel), built=built, findings=found)


def _lacks(ops: tuple[str, ...], built: DeepSpeed) -> tuple[Finding, ...]:
    holds = ", ".join(built.installed_ops) or "no op"
    title = f"{', '.join(ops)} was asked for, and the wheel holds {holds}"
    return (Finding.error("op-not-in-wheel", title, affects=ops),)


def _worth(candidate: Candidate) -> tuple[bool, Version, int, int, str]:
    built = candidate.built
    doubts = sum(finding.severity is Severity.WARNING for finding in candidate.findings)
    version = Version(built.version) if built else Version("0")
    return candidate.fits, Version(version.public), len(built.installed_ops) if built else 0, -doubts, candidate.wheel
