"""Machine -> findings. Asks the machine nothing. A check that fails with an error becomes a NOTE; the others still run.

A check is a generator named after its rule, whose words stand in ``rules/checks.toml``. What a finding ``affects`` is a need of
``dsdoctor.core.machine`` or the name of an op; the op table turns needs into ops.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsdoctor.checks import built, compilers, files, gpus, python, system, toolkits
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine
from dsdoctor.rules import book

Check = Callable[[Machine], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Checks that are shown together below one line, ``summary``, which says what is there."""

    name: str
    summary: Callable[[Machine], str]
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A topic's line and what its checks found."""

    topic: str
    summary: str
    findings: tuple[Finding, ...]


TOPICS = (
    Topic(name="python", summary=python.summary, checks=python.CHECKS),
    Topic(name="gpu", summary=gpus.summary, checks=gpus.CHECKS),
    Topic(name="toolkit", summary=toolkits.summary, checks=toolkits.CHECKS),
    Topic(name="compiler", summary=compilers.summary, checks=compilers.CHECKS),
    Topic(name="deepspeed", summary=built.summary, checks=built.CHECKS + files.CHECKS),
    Topic(name="system", summary=system.summary, checks=system.CHECKS),
)


def rule_of(check: Check) -> str:
    """A check's rule id.

    >>> rule_of(toolkits.cuda_toolkit_missing)
    'cuda-toolkit-missing'
    """
    return getattr(check, "__name__", "").replace("_", "-")


def checks() -> dict[str, Check]:
    """Every check by its rule id."""
    return {rule_of(check): check for topic in TOPICS for check in topic.checks}


def examine(
    machine: Machine, *, topics: tuple[Topic, ...] = TOPICS, rules: frozenset[str] = frozenset()
) -> tuple[Examined, ...]:
    """Run the checks (``rules`` empty: all). Raises UsageError for a rule that no check has."""
    unknown = sorted(rules - set(checks()))
    if unknown:
        raise UsageError(f"there is no check {unknown[0]!r}", hint="dsdoctor check --list names them all")
    return tuple(
        Examined(topic=topic.name, summary=topic.summary(machine), findings=tuple(_run(topic, machine, rules)))
        for topic in topics
        if not rules or any(rule_of(check) in rules for check in topic.checks)
    )


def _run(topic: Topic, machine: Machine, rules: frozenset[str]) -> Iterator[Finding]:
    for check in topic.checks:
        if rules and rule_of(check) not in rules:
            continue
        try:
            yield from tuple(check(machine))
        except Exception as error:
            yield book.finding(
                "check-broken",
                Severity.NOTE,
                case="error",
                check=rule_of(check),
                error=f"{type(error).__name__}: {error}",
            )
