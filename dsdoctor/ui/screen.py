"""What one screen shows of findings, how the screens of a plan and of a build end, and the one JSON document in their place."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Finding, Follows, Severity, Step, has_error, step
from dsdoctor.core.text import and_more, encode
from dsdoctor.ui.terminal import VerdictLine, finding_lines

# Data -> the one JSON document that ``--json`` prints.


SCHEMA = "dsdoctor/1"


def document(command: str, findings: tuple[Finding, ...], **parts: Any) -> str:
    """One document of a command: its own parts, then the findings.

    >>> print(document("toolkit", (), toolkit=None))
    {"schema":"dsdoctor/1","command":"toolkit","toolkit":null,"findings":[]}
    """
    whole = {"schema": SCHEMA, "command": command, **parts, "findings": findings}
    return encode(whole).decode()


# Findings -> what one screen shows of them: the most harmful, the others counted, and the one next step at the end.


MOST = 3
"""Findings that are shown at once, but for errors, which are all shown: each of them stands in the way."""
MAX_ERRORS_OF_A_RULE = 20
"""A thousand ranks may raise the same."""
MOST_RULES = 6
ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def most_harmful(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; of two alike what names no op (it affects all), then what affects more of them."""

    def harm(finding: Finding) -> tuple[int, bool, int]:
        return ORDER.index(finding.severity), bool(finding.affects), -len(finding.affects)

    return tuple(sorted(findings, key=harm))


def divided(findings: Iterable[Finding], most: int = MOST) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The findings that are shown at once, the most harmful first, and the others: every error, and others up to ``most``."""
    shown: list[Finding] = []
    left: list[Finding] = []
    of_rule: Counter[str] = Counter()
    for finding in most_harmful(findings):
        of_rule[finding.rule] += 1
        kept = finding.severity is Severity.ERROR and of_rule[finding.rule] <= MAX_ERRORS_OF_A_RULE
        (shown if kept or len(shown) < most else left).append(finding)
    return tuple(shown), tuple(left)


def screen_lines(findings: Iterable[Finding], *, shows_all: str = "", most: int = MOST) -> Iterator[str]:
    """Every error, other findings up to ``most``, then how many more there are. ``shows_all``: the option that shows them; "":
    all are shown."""
    shown, left = divided(findings, most) if shows_all else (most_harmful(findings), ())
    yield from finding_lines(shown)
    if left:
        rules = and_more(tuple(dict.fromkeys(finding.rule for finding in left)), MOST_RULES)
        yield f"· and {counted(left)}: {rules} ({shows_all} shows all)"


def counted(findings: Sequence[Finding]) -> str:
    """How many there are of each severity.

    >>> counted((Finding.error("a", "t"), Finding.note("b", "t"), Finding.note("c", "t")))
    '1 error, 2 notes'
    """
    numbers = {each: sum(finding.severity is each for finding in findings) for each in ORDER}
    return ", ".join(f"{number} {each.value}{'s' * (number > 1)}" for each, number in numbers.items() if number)


def next_line(command: Step) -> str:
    """The last line of a screen.

    >>> next_line(step("python -m dsdoctor check"))
    '  next: $ python -m dsdoctor check'
    """
    return f"  next: $ {command.printed}"


def first_step(findings: Iterable[Finding]) -> Step | None:
    """What to do first: the first command of the most harmful finding's fix, its page where it has none; None without a problem."""
    ordered = most_harmful(findings)
    if not ordered or ordered[0].severity is Severity.NOTE:
        return None
    worst = ordered[0]
    for command in worst.fix.steps if worst.fix else ():
        if command.follows is Follows.THEN:
            return command
    return step("python -m dsdoctor explain {rule}", rule=worst.rule)


# How the screens of a plan and of a build end: what speaks against it, one verdict, one next step.


def plan_end_lines(plan: BuildPlan, *, verbose: bool, build: Step) -> Iterator[str]:
    """The worst findings, then whether it can be built. ``build``: the command that carries it out."""
    yield ""
    if plan.findings:
        yield from screen_lines(plan.findings, shows_all="" if verbose else "-v")
        yield ""
    if has_error(plan.findings):
        errors = tuple(finding for finding in plan.findings if finding.severity is Severity.ERROR)
        yield VerdictLine(f"✗ {counted(errors)}: it cannot be built like this")
        if command := first_step(plan.findings):
            yield next_line(command)
        return
    names = ", ".join(op.op for op in plan.ops) or "DeepSpeed without ops"
    yield VerdictLine(f"{_mark(plan)} {names} can be built")
    yield next_line(build)


def _mark(plan: BuildPlan) -> str:
    return "!" if any(finding.severity is Severity.WARNING for finding in plan.findings) else "✓"


def install_lines(plan: BuildPlan, wheel: str) -> Iterator[str]:
    """The next command after a build. pip leaves a version alone that is installed, whatever is in the wheel."""
    python = "python" if plan.python == sys.executable else plan.python
    yield next_line(step("{python} -m pip install {wheel}", python=python, wheel=wheel))
    if not plan.tagged:
        again = step(
            "{python} -m pip install --no-deps --force-reinstall {wheel}",
            python=python,
            wheel=wheel,
            note="where pip says that this version is installed",
        )
        yield f"    or: $ {again.printed}"
