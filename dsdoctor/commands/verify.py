"""verify: a built DeepSpeed against a machine -> findings. Runs nothing of it unless it is to load the installed ops."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.wheel.attested import judge_attestations
from dsdoctor.builder.wheel.load import load_installed
from dsdoctor.builder.wheel.read import read_installed, read_wheel
from dsdoctor.checks import TOPICS, examine, rule_of
from dsdoctor.commands.observe import Observation, observe
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, for_python, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed, Machine

RUNS = ("python-silent", "torch-missing", "torch-broken")
"""What keeps every built DeepSpeed from running."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for a built DeepSpeed: its facts, and what was found against the machine."""

    machine: Machine
    built: DeepSpeed
    findings: tuple[Finding, ...]


def verify(python: str, machine: Path | None, wheel: Path | None, *, load: bool = False) -> Verified:
    """Judge a wheel, or (None) the installed DeepSpeed, against a machine. Raises UsageError for what is no such wheel.

    ``load`` tries the installed ops too: the one thing here that runs them.
    """
    if load and (wheel is not None or machine is not None):
        raise UsageError("--load tries the DeepSpeed that is installed here", hint="dsdoctor verify --installed --load")
    # a file that is not a wheel is refused before the machine is asked
    read = read_wheel(wheel) if wheel is not None else None
    observation = observe(python, machine, whole=False)
    built = read or _installed(observation)
    judged = judge(observation, built, python)
    if wheel is not None:
        return replace(judged, findings=judged.findings + judge_attestations(wheel))
    if load and not has_error(judged.findings):
        asked = judged.machine.python.executable if judged.machine.python else python
        loaded = load_installed(LocalHost(), asked, built, judged.machine)
        return replace(judged, findings=judged.findings + loaded)
    return judged


def judge(observation: Observation, built: DeepSpeed, python: str) -> Verified:
    """A built DeepSpeed against what was seen of a machine."""
    with_built = replace(observation.machine, deepspeed=built)
    of_built = next(topic.checks for topic in TOPICS if topic.name == "deepspeed")
    rules = frozenset({*RUNS, *map(rule_of, of_built)})
    found = examine(with_built, topics=TOPICS, rules=rules)
    findings = tuple(_of_ops(finding, built) for topic in found for finding in topic.findings)
    if observation.is_here and python != sys.executable:
        findings = tuple(for_python(finding, python) for finding in findings)
    return Verified(machine=with_built, built=built, findings=findings)


def _installed(observation: Observation) -> DeepSpeed:
    """The installed DeepSpeed with what its files say, where they are at hand."""
    installed = observation.machine.deepspeed
    if installed is None:
        raise UsageError(
            "no DeepSpeed is installed there", hint="name a wheel, or another environment with --python PATH"
        )
    return read_installed(installed) if observation.is_here else installed


def _of_ops(finding: Finding, built: DeepSpeed) -> Finding:
    """The finding with the ops that it affects: those it names, else all."""
    named = tuple(op for op in finding.affects if op in built.installed_ops)
    return replace(finding, affects=named or (built.installed_ops if finding.affects else ()))
