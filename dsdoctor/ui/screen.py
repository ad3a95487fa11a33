"""Findings -> what one screen shows of them: the most harmful, the others counted, and the one next step at the end."""

from collections.abc import Iterable, Iterator, Sequence

from dsdoctor.core.finding import Finding, Follows, Severity, Step, step
from dsdoctor.core.text import and_more
from dsdoctor.report.terminal import finding_lines

MOST = 3
"""Findings that are shown at once: who reads more mends none."""
MOST_RULES = 6
ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def most_harmful(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; of two alike what names no op (it affects all), then what affects more of them."""

    def harm(finding: Finding) -> tuple[int, bool, int]:
        return ORDER.index(finding.severity), bool(finding.affects), -len(finding.affects)

    return tuple(sorted(findings, key=harm))


def screen_lines(findings: Iterable[Finding], *, shows_all: str = "", most: int = MOST) -> Iterator[str]:
    """The most harmful findings, then how many more there are. ``shows_all``: the option that shows them; "": all are shown."""
    ordered = most_harmful(findings)
    shown = ordered[:most] if shows_all else ordered
    yield from finding_lines(shown)
    if left := ordered[len(shown) :]:
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
