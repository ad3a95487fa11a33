"""A built DeepSpeed and what was seen of a machine -> what stands in the way of its use there. Pure."""

import sys
from dataclasses import dataclass, replace

from dsdoctor.checks import TOPICS, examine, rule_of
from dsdoctor.core.finding import Finding, for_python
from dsdoctor.core.machine import DeepSpeed, Machine
from dsdoctor.probe.observe import Observation

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
    if observation.is_here and python != sys.executable:
        findings = tuple(for_python(finding, python) for finding in findings)
    return Verified(machine=with_built, built=built, findings=findings)


def _of_ops(finding: Finding, built: DeepSpeed) -> Finding:
    """The finding with the ops that it affects: those it names, else all."""
    named = tuple(op for op in finding.affects if op in built.installed_ops)
    return replace(finding, affects=named or (built.installed_ops if finding.affects else ()))
