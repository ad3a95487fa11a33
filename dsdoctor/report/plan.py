"""How the screen of a plan ends: what speaks against it, one verdict, one next step."""

from collections.abc import Iterator

from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Severity, has_error
from dsdoctor.core.fix import step
from dsdoctor.report.screen import counted, first_step, next_line, screen_lines
from dsdoctor.report.terminal import VerdictLine


def plan_end_lines(plan: BuildPlan, *, verbose: bool, is_usual: bool) -> Iterator[str]:
    """The worst findings, then whether it can be built. ``is_usual``: build-wheel without an option would do this."""
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
    yield VerdictLine(
        f"{_mark(plan)} {names} can be built{'' if is_usual else ': build-wheel with the same options does it'}"
    )
    if is_usual:
        yield next_line(step("python -m dsdoctor build-wheel"))


def _mark(plan: BuildPlan) -> str:
    return "!" if any(finding.severity is Severity.WARNING for finding in plan.findings) else "✓"
