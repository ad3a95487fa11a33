"""How the screens of a plan and of a build end: what speaks against it, one verdict, one next step."""

import sys
from collections.abc import Iterator

from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Severity, Step, has_error, step
from dsdoctor.report.screen import counted, first_step, next_line, screen_lines
from dsdoctor.report.terminal import VerdictLine


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
