"""What a command's screen shows: the most harmful findings, a machine, a plan, a build's result, the one next step; and the one
JSON document in their place."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dsdoctor.core.finding import Finding, Follows, Severity, Step, has_error, step
from dsdoctor.core.text import and_more, encode
from dsdoctor.ui.terminal import NEXT, VerdictLine, finding_lines

if TYPE_CHECKING:
    from dsdoctor.core.build_models import BuildPlan, BuildResult, ToolkitPlan
    from dsdoctor.core.machine import Machine, Toolkit

SCHEMA = "dsdoctor/1"
MAX_FINDINGS = 3
"""Findings that are shown at once, but for errors, which are all shown: each of them stands in the way."""
MAX_ERRORS_OF_A_RULE = 20
"""A thousand ranks may raise the same."""
MAX_RULES = 6
ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
MIB, GIB = 1 << 20, 1 << 30


def document(command: str, findings: tuple[Finding, ...], **parts: Any) -> str:
    """One document of a command: its own parts, then the findings.

    >>> print(document("toolkit", (), toolkit=None))
    {"schema":"dsdoctor/1","command":"toolkit","toolkit":null,"findings":[]}
    """
    whole = {"schema": SCHEMA, "command": command, **parts, "findings": findings}
    return encode(whole).decode()


def most_harmful(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; of two alike what names no op (it affects all), then what affects more of them."""

    def harm(finding: Finding) -> tuple[int, bool, int]:
        return ORDER.index(finding.severity), bool(finding.affects), -len(finding.affects)

    return tuple(sorted(findings, key=harm))


def divided(findings: Iterable[Finding], most: int = MAX_FINDINGS) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The findings that are shown at once, the most harmful first, and the others: every error, and others up to ``most``."""
    shown: list[Finding] = []
    left: list[Finding] = []
    of_rule: Counter[str] = Counter()
    for finding in most_harmful(findings):
        of_rule[finding.rule] += 1
        kept = finding.severity is Severity.ERROR and of_rule[finding.rule] <= MAX_ERRORS_OF_A_RULE
        (shown if kept or len(shown) < most else left).append(finding)
    return tuple(shown), tuple(left)


def screen_lines(findings: Iterable[Finding], *, shows_all: str = "", most: int = MAX_FINDINGS) -> Iterator[str]:
    """Every error, other findings up to ``most``, then how many more there are. ``shows_all``: the option that shows them; "":
    all are shown."""
    shown, left = divided(findings, most) if shows_all else (most_harmful(findings), ())
    yield from finding_lines(shown)
    if left:
        rules = and_more(tuple(dict.fromkeys(finding.rule for finding in left)), MAX_RULES)
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
    return f"{NEXT}{command.printed}"


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


def machine_lines(machine: Machine) -> Iterator[str]:
    """The facts, one line each, with details below."""
    system, python, torch = machine.system, machine.python, machine.torch
    memory = f"{system.memory / GIB:.0f} GiB" if system.memory else "unknown memory"
    yield f"{system.os}, {system.architecture}, glibc {system.glibc}, {system.cpus} processors, {memory}"
    yield f"Python {python.version}  {python.executable}" if python else "no Python answered"
    if torch:
        broken = f", cannot be imported: {torch.broken}" if torch.broken else ""
        yield f"torch {torch.version}, CUDA {torch.cuda}, C++{torch.cxx_standard} headers{broken}"
        yield f"    the CUDA_HOME that torch would use: {torch.cuda_home}"
        yield f"    built for {' '.join(torch.arch_list) or 'no GPU'}; visible GPUs: {' '.join(torch.capabilities) or 'none'}"
    else:
        yield "no torch"
    deepspeed = machine.deepspeed
    yield (
        f"DeepSpeed {deepspeed.version}, ops: {' '.join(deepspeed.installed_ops) or 'none'}"
        if deepspeed
        else "no DeepSpeed"
    )
    for toolkit in machine.toolkits:
        yield from _toolkit_lines(toolkit)
    for compiler in machine.compilers:
        yield f"{compiler.kind} {'.'.join(map(str, compiler.version))}  {compiler.path}"
    yield (
        f"driver {machine.driver.version}, runs CUDA up to {machine.driver.cuda}"
        if machine.driver
        else "no NVIDIA driver"
    )
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}: {gpu.name}, capability {gpu.capability}" + (
            f", {gpu.memory / GIB:.0f} GiB" if gpu.memory else ""
        )
    for library in machine.libraries:
        yield f"{library.name}  {library.library}" + ("" if library.header else "  (without its header)")
    for gap in machine.gaps:
        yield f"! {gap.question} could not be queried: {gap.reason}"


def plan_lines(plan: BuildPlan) -> Iterator[str]:
    """What will be done and why."""
    yield f"a wheel for {plan.python}"
    width = max(len(choice.what) for choice in plan.choices)
    for choice in plan.choices:
        yield f"✓ {choice.what:<{width}}  {choice.value}"
        yield f"  {'':<{width}}  because {choice.because}"
    for line in fetched_lines(plan.toolkit):
        yield f"  {'':<{width}}  {line}"
    for op in plan.ops:
        if op.device_code and op.architectures != plan.architectures:
            yield f"· {op.op} for {';'.join(op.architectures)} only: it only filters the list"
    for left in plan.left_out:
        yield f"· without {left.op}: {left.because}"
    yield "  environment:"
    for name, value in sorted(plan.env.items()):
        yield f"    {name}={shlex.quote(value)}"
    for name, folders in sorted(plan.prepend.items()):
        yield f"    {name}={shlex.quote(':'.join(folders))}:${name}"


def fetched_lines(toolkit: ToolkitPlan | None) -> Iterator[str]:
    """What a toolkit is fetched from."""
    if toolkit is None:
        return
    if toolkit.archives:
        parts = ", ".join(f"{archive.name} {archive.version}" for archive in toolkit.archives)
        yield f"fetches NVIDIA's archives {parts} ({sum(archive.size for archive in toolkit.archives) / 1e6:.0f} MB)"
    for package in toolkit.packages:
        where = f"{package.distribution} {package.suite}, {package.component}"
        yield f"fetches {package.name} {package.version} with apt, not installed ({where}; {package.size / 1e6:.0f} MB)"
    if toolkit.fetch:
        yield f"fetches {', '.join(toolkit.fetch)} from PyPI"


def plan_end_lines(plan: BuildPlan, *, verbose: bool, build: Step) -> Iterator[str]:
    """The worst findings, then whether it can be built. ``build``: the command that carries it out."""
    yield ""
    if plan.findings:
        yield from screen_lines(plan.findings, shows_all="" if verbose else "-v")
        yield ""
    if has_error(plan.findings):
        errors = tuple(finding for finding in plan.findings if finding.severity is Severity.ERROR)
        yield VerdictLine(f"✗ {counted(errors)}: it cannot be built in this environment")
        if command := first_step(plan.findings):
            yield next_line(command)
        return
    names = ", ".join(op.op for op in plan.ops) or "DeepSpeed without ops"
    mark = "!" if any(finding.severity is Severity.WARNING for finding in plan.findings) else "✓"
    yield VerdictLine(f"{mark} {names} can be built")
    yield next_line(build)


def result_lines(result: BuildResult) -> Iterator[str]:
    """One line for each op, then the wheel."""
    for op in result.ops:
        if op.built:
            yield f"✓ {op.op:<24} {'from the cache' if op.cached else f'{op.seconds:.0f} s'}"
        else:
            yield f"{'✗' if op.log or op.asked else '·'} {op.op:<24} {op.because}"
            if op.log:
                yield f"    log: {op.log}"
    if result.wheel:
        size = os.stat(result.wheel).st_size / MIB  # noqa: PTH116
        yield VerdictLine(
            f"✓ {result.wheel}  ({size:.1f} MiB, {result.seconds:.0f} s, {result.cpu_seconds:.0f} CPU-seconds)"
        )
        yield f"  contents and supported machines: {result.manifest}"
    else:
        yield VerdictLine(f"✗ no wheel; full log: {result.log}")


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


def _toolkit_lines(toolkit: Toolkit) -> Iterator[str]:
    compiler = f"nvcc {toolkit.version}" if toolkit.nvcc else f"no nvcc, headers of CUDA {toolkit.version}"
    yield f"CUDA {toolkit.release}  {toolkit.root}  ({compiler}; found via {', '.join(toolkit.found_via)})"
    yield f"    headers: {' '.join(sorted(toolkit.headers)) or 'none'}"
    yield f"    libraries to link: {' '.join(sorted(toolkit.libraries)) or 'none'}"
