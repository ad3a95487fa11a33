"""Findings, plans and results -> lines for a terminal. Colour only repeats what the marks say."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dsdoctor.core.finding import Finding, Follows, Severity
from dsdoctor.core.text import and_more
from dsdoctor.report.wrap import in_letters, wrapped

# every command prints with this file, and few of them have a plan or a machine
if TYPE_CHECKING:
    from dsdoctor.core.build_models import BuildPlan, BuildResult, ToolkitPlan
    from dsdoctor.core.machine import Machine, Toolkit
    from dsdoctor.report.stream import Screen

MARKS = {Severity.NOTE: "·", Severity.WARNING: "!", Severity.ERROR: "✗"}
BOLD, DIM = "1", "2"
STYLES = {"✓": "32", "!": "33", "✗": "31", "·": DIM}
MIB, GIB = 1 << 20, 1 << 30
MOST_NAMES = 6
STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
NEXT = "  next: $ "
TITLE = re.compile(r"[✗!] .*\[[a-z0-9-]+\]$")
RULE = re.compile(r"\s*\[[a-z0-9-]+\]$")
LIKE_OURS = re.compile(r"\s*(?:(?:(?:or|then|next:) )?\$ |Fix:|[✓✗!·] )")


class VerdictLine(str):
    """The line that says how it is: it stands out among the others."""

    __slots__ = ()


def show(screen: Screen, lines: Iterable[str]) -> None:
    """Print lines: a mark at the start is coloured, titles and verdicts are bold. On a terminal, or where COLUMNS says how
    wide, words wrap.

    In a pipe a line stays whole, so that it can be searched. A reader that has gone away ends it without an error.
    """
    width, in_ascii, colours = screen_width(screen), not has_marks(screen), screen.is_terminal and not screen.no_color
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            said = printable(line)
            mark = said.lstrip()[:1]
            said = in_letters(said) if in_ascii else said
            for place, part in enumerate(wrapped(said, width) if width else [said]):
                text = _styled(part, line, mark, first=not place) if colours else part
                screen.file.write(f"{text}\n")
        screen.file.flush()


def screen_width(screen: Screen) -> int | None:
    """The columns that a line may have; None where it is not broken."""
    return screen.width if screen.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def _styled(part: str, line: str, mark: str, *, first: bool) -> str:
    """A part of a line with its colours. ``mark``: the line's own, which may stand there in letters."""
    if isinstance(line, VerdictLine):
        return _painted(part, BOLD, STYLES.get(mark, ""))
    if line.startswith(NEXT):
        return _painted(part, BOLD)
    if mark not in STYLES:
        return part
    begin = len(part) - len(part.lstrip()) + len(part.split(maxsplit=1)[0]) if first else 0
    coloured, rest = part[:begin], part[begin:]
    if not TITLE.match(line):
        return _painted(coloured, STYLES[mark]) + rest
    rule = RULE.search(rest)
    end = rule.start() if rule else len(rest)
    return _painted(coloured, BOLD, STYLES[mark]) + _painted(rest[:end], BOLD) + _painted(rest[end:], DIM)


def _painted(text: str, *codes: str) -> str:
    return f"\x1b[{';'.join(filter(None, codes))}m{text}\x1b[0m" if text else ""


def has_marks(screen: Screen) -> bool:
    """Whether the terminal's encoding has our marks."""
    try:
        "✓✗·".encode(screen.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def show_talk(screen: Screen, line: str) -> None:
    """A line about what goes on, which is no result."""
    show(screen, [f"* {line}"])


def printable(line: str) -> str:
    """A line with what steers a terminal escaped, because it may hold text of others: control characters, directions, breaks.

    >>> print(printable("a\\x1b[31mb\\nc\\udce9 \\u202ex"))
    a\\x1b[31mb\\x0ac\\udce9 \\u202ex
    """
    if line.isprintable():
        return line
    return "".join(_escaped(char) if unicodedata.category(char) in STEERING else char for char in line)


def _escaped(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def evidence_line(evidence: str) -> str:
    """A line of evidence, which may be somebody else's: what looks like a line of ours is marked as a quotation.

    >>> print(evidence_line("  $ touch x"), evidence_line("/usr/bin/nvcc"), sep="\\n")
        | $ touch x
        /usr/bin/nvcc
    """
    return f"    | {evidence.strip()}" if LIKE_OURS.match(evidence) else f"    {evidence}"


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Title with its rule, evidence, the fix and its commands."""
    for finding in findings:
        yield f"{MARKS[finding.severity]} {finding.title}  [{finding.rule}]"
        yield from map(evidence_line, finding.evidence)
        if len(finding.affects) > 1 or (finding.affects and finding.affects[0] not in finding.title):
            yield f"    affects {and_more(finding.affects, MOST_NAMES)}"
        if finding.fix:
            yield f"    Fix: {finding.fix.text}"
            for place, step in enumerate(finding.fix.steps):
                word = "or" if step.follows is Follows.INSTEAD else "then" if place else ""
                yield f" {word:>4} $ {step.printed}"


def machine_lines(machine: Machine) -> Iterator[str]:
    """The facts, one line each, with details below."""
    system, python, torch = machine.system, machine.python, machine.torch
    memory = f"{system.memory / GIB:.0f} GiB" if system.memory else "unknown memory"
    yield f"{system.os}, {system.architecture}, glibc {system.glibc}, {system.cpus} processors, {memory}"
    yield f"Python {python.version}  {python.executable}" if python else "no Python answered"
    if torch:
        broken = f", cannot be imported: {torch.broken}" if torch.broken else ""
        yield f"torch {torch.version}, CUDA {torch.cuda}, C++{torch.cxx_standard} headers{broken}"
        yield f"    the CUDA_HOME that torch would take: {torch.cuda_home}"
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
        yield f"! {gap.question} could not be asked: {gap.reason}"


def _toolkit_lines(toolkit: Toolkit) -> Iterator[str]:
    compiler = f"nvcc {toolkit.version}" if toolkit.nvcc else f"no nvcc, headers of CUDA {toolkit.version}"
    yield f"CUDA {toolkit.release}  {toolkit.root}  ({compiler}; found via {', '.join(toolkit.found_via)})"
    yield f"    headers: {' '.join(sorted(toolkit.headers)) or 'none'}"
    yield f"    libraries to link: {' '.join(sorted(toolkit.libraries)) or 'none'}"


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
            yield f"· {op.op} for {';'.join(op.architectures)} only: it filters the list"
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
        yield f"fetches {package.name} {package.version} by apt, not installed ({where}; {package.size / 1e6:.0f} MB)"
    if toolkit.fetch:
        yield f"fetches {', '.join(toolkit.fetch)} from PyPI"


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
        yield f"  what is in it, and for which machines: {result.manifest}"
    else:
        yield VerdictLine(f"✗ no wheel; the whole log is {result.log}")
