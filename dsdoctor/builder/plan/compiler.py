"""The host compiler of a build, one that both nvcc and torch accept, and the processor that it compiles for. Pure.

DeepSpeed compiles ops such as ``cpu_adam`` with -march=native, and chooses its SIMD macro by the machine that it builds on; the two
must agree. The levels are those of the x86-64 psABI, and versions of the Arm architecture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsdoctor.core.architectures import instructions_of, lacking_instructions
from dsdoctor.core.build_models import Choice, ToolkitPlan
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Compiler, Machine, Node, System, Toolkit, compiler_limits, fits, newest_compiler
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.text import and_more
from dsdoctor.rules import book


def choose_compiler(
    machine: Machine, toolkit: ToolkitPlan | None, *, device_code: bool
) -> tuple[Compiler | None, tuple[Choice, ...], tuple[Finding, ...]]:
    """The default compiler if it fits, else the newest that does (gcc before clang), else a finding."""
    limits = {kind: _limits(machine, toolkit if device_code else None, kind) for kind in ("gcc", "clang")}
    fitting = [c for c in machine.compilers if c.c_path and fits(c, limits[c.kind])]
    if not fitting:
        return None, (), (_nothing_fits(machine, toolkit, limits["gcc"]),)
    default = machine.compilers[0]
    if fitting[0] == default:
        accepted = _accepted(limits[default.kind], toolkit, device_code=device_code)
        because = book.phrase("builder", "default-compiler", accepted=accepted)
        return default, (_choice(default, because),), ()
    chosen = max(fitting, key=lambda compiler: (compiler.kind == "gcc", compiler.version))
    because = book.phrase(
        "builder",
        "other-compiler",
        default=f"{default.path} {version_of(default)}",
        accepted=_accepted(limits[chosen.kind], toolkit, device_code=device_code),
    )
    return chosen, (_choice(chosen, because),), ()


def name_of(compiler: Compiler) -> str:
    """A compiler with its version, such as "gcc 12.2.0"."""
    return f"{compiler.kind} {version_of(compiler)}"


def version_of(compiler: Compiler) -> str:
    """A compiler's version as text, such as "12.2.0"."""
    return ".".join(map(str, compiler.version))


def _limits(machine: Machine, toolkit: ToolkitPlan | None, kind: str) -> tuple[int, int | None]:
    """The oldest and the newest major that may be used; None for the newest where no limit is known."""
    assert machine.torch is not None
    if toolkit is None:
        return compiler_limits(machine.torch, kind, ())
    known = [
        known
        for known in machine.toolkits
        if known.root == toolkit.root or (toolkit.assemble and known.release == toolkit.release)
    ]
    # an assembled toolkit does not exist yet: its release tells, with torch's own table of compilers and what is known of its nvcc
    planned = Toolkit(root=toolkit.root, release=toolkit.release)
    if toolkit.fetches:
        newest = {name: newest_compiler(toolkit.release, name) for name in ("gcc", "clang")}
        planned = replace(planned, newest_gcc=newest["gcc"], newest_clang=newest["clang"])
    return compiler_limits(machine.torch, kind, [*known, planned])


def _accepted(limits: tuple[int, int | None], toolkit: ToolkitPlan | None, *, device_code: bool) -> str:
    oldest, newest = limits
    if device_code and toolkit is not None and newest is not None:
        return book.phrase("builder", "compiler-between", oldest=oldest, nvcc=str(toolkit.release), newest=newest)
    return book.phrase("builder", "compiler-from", oldest=oldest)


def _nothing_fits(machine: Machine, toolkit: ToolkitPlan | None, gcc: tuple[int, int | None]) -> Finding:
    oldest, newest = gcc
    package = "g++" if newest is None else f"g++-{newest}"
    if not machine.compilers:
        return book.finding("host-compiler-missing", Severity.ERROR, case="build", package=package)
    seen = [f"{compiler.path}: {name_of(compiler)}" for compiler in machine.compilers]
    here = name_of(machine.compilers[0])
    if newest is None or not all(compiler.major > newest for compiler in machine.compilers):
        return book.finding(
            "host-compiler-too-old",
            Severity.ERROR,
            case="build",
            evidence=seen,
            oldest=oldest,
            here=here,
            package=package,
        )
    return book.finding(
        "host-compiler-too-new",
        Severity.ERROR,
        case="build",
        evidence=seen,
        nvcc=str(toolkit.release) if toolkit else "",
        newest=newest,
        here=here,
        package=package,
    )


def _choice(compiler: Compiler, because: str) -> Choice:
    return Choice(what="compiler", value=f"{compiler.path} ({name_of(compiler)})", because=because)


NATIVE = "native"
MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Level:
    """A value of -march that covers many processors, with DeepSpeed's macro for its vector instructions.

    ``gcc`` and ``clang`` are the oldest majors that know it.
    """

    name: str
    architecture: str
    simd: str
    gcc: int
    clang: int


LEVELS = (
    Level(name="x86-64", architecture="x86_64", simd="-D__SCALAR__", gcc=5, clang=5),
    Level(name="x86-64-v2", architecture="x86_64", simd="-D__SCALAR__", gcc=11, clang=12),
    Level(name="x86-64-v3", architecture="x86_64", simd="-D__AVX256__", gcc=11, clang=12),
    Level(name="x86-64-v4", architecture="x86_64", simd="-D__AVX512__", gcc=11, clang=12),
    Level(name="armv8-a", architecture="aarch64", simd="-D__NEON__", gcc=5, clang=5),
    Level(name="armv8.2-a", architecture="aarch64", simd="-D__NEON__", gcc=7, clang=5),
    Level(name="armv8.2-a+sve", architecture="aarch64", simd="-D__SVE__", gcc=10, clang=11),
    Level(name="armv9-a", architecture="aarch64", simd="-D__SVE__", gcc=12, clang=14),
)
"""A level includes the earlier ones of its architecture. DeepSpeed's simd.h has code for AVX2 (with FMA and F16C, which v3 has),
AVX512 (F, BW, DQ, VL, which v4 has) and NEON. Its sve.h asks the processor how long its vectors are: no -msve-vector-bits."""


def choose_processor(
    machine: Machine, request: BuildRequest, compiler: Compiler | None
) -> tuple[str, Choice, tuple[Finding, ...]]:
    """NATIVE or the name of a level: the one asked for, else the best that all nodes have, else NATIVE.

    Raises UsageError for an unknown level, and for a level or nodes of another architecture than this machine's.
    """
    _check_nodes(machine, request.nodes)
    if request.cpu:
        name, because = _asked(machine, request.cpu), "--cpu"
    elif request.nodes:
        name, because = _shared(request.nodes)
    else:
        name, because = NATIVE, book.phrase("builder", "native")
    findings = (*_not_on(machine, request.nodes, name), *_above(machine, name), *_unknown(compiler, name))
    return name, Choice(what="processor", value=name, because=because), findings


def flags_of(processor: str) -> tuple[str, ...]:
    """The flags that replace DeepSpeed's own; none for NATIVE.

    >>> flags_of("x86-64-v3"), flags_of("armv8.2-a+sve")
    (('-march=x86-64-v3', '-D__AVX256__'), ('-march=armv8.2-a+sve', '-D__SVE__'))
    """
    return next(((f"-march={level.name}", level.simd) for level in LEVELS if level.name == processor), ())


def lacking(processor: str, system: System) -> tuple[str, ...]:
    """The instructions of a level that a machine does not have; none for NATIVE."""
    return lacking_instructions(flags_of(processor)[:1], system.cpu_flags)


def _asked(machine: Machine, asked: str) -> str:
    here = machine.system.architecture
    level = next((level for level in LEVELS if asked in (level.name, level.name.removeprefix("x86-64-"))), None)
    fitting = ", ".join((NATIVE, *(level.name for level in LEVELS if level.architecture == here)))
    if asked == NATIVE:
        return NATIVE
    if level is None:
        raise UsageError(f"--cpu {asked!r} is not a level", hint=f"on {here} use one of: {fitting}")
    if level.architecture != here:
        title = f"--cpu {level.name} is for {level.architecture}, but this machine is {here}"
        raise UsageError(title, hint=f"on {here} use one of: {fitting}")
    return level.name


def _check_nodes(machine: Machine, nodes: Sequence[Node]) -> None:
    """Raise UsageError for nodes that a wheel built on this machine cannot serve all."""
    here = machine.system.architecture
    for node in nodes:
        first, kind = nodes[0], node.system.architecture
        if kind != first.system.architecture:
            raise UsageError(
                f"{first.name} is {first.system.architecture}, but {node.name} is {kind}; one wheel can't serve both",
                hint="build one wheel for each architecture, and name its nodes with --node",
            )
        if kind != here:
            raise UsageError(
                f"{node.name} is {kind}, but this machine is {here}; build the wheel on {kind}",
                hint="run this on one of the nodes",
            )
        if not node.system.cpu_flags:
            raise UsageError(
                f"the snapshot of {node.name} does not list its processor's instructions",
                hint="record it again on that machine: dsdoctor machine record FILE",
            )


def _shared(nodes: Sequence[Node]) -> tuple[str, str]:
    """The best level that all nodes have, and which of them has no better one."""
    levels = [level for level in LEVELS if level.architecture == nodes[0].system.architecture]
    fitting = [level for level in levels if not any(lacking(level.name, node.system) for node in nodes)]
    if not fitting:
        raise UsageError(
            f"{nodes[0].name} supports none of dsdoctor's levels for {nodes[0].system.architecture}",
            hint="--cpu native, on one of the nodes",
        )
    because = book.phrase("builder", "best-of-nodes" if len(nodes) > 1 else "best-of-node", nodes=_names(nodes))
    if len(fitting) < len(levels):
        better = levels[len(fitting)].name
        limits = [node for node in nodes if lacking(better, node.system)]
        because = book.phrase(
            "builder",
            "limited-by-nodes" if len(limits) > 1 else "limited-by-node",
            because=because,
            nodes=_names(limits, models=True),
            instructions=and_more(lacking(better, limits[0].system), MAX_SHOWN),
            level=better,
        )
    return fitting[-1].name, because


def _not_on(machine: Machine, nodes: Sequence[Node], name: str) -> Iterator[Finding]:
    """The nodes that cannot run what is to be compiled."""
    here = instructions_of(machine.system.cpu_flags)
    missing = {
        node.name: tuple(name for name in here if name not in instructions_of(node.system.cpu_flags))
        if name == NATIVE
        else lacking(name, node.system)
        for node in nodes
    }
    bad = [node for node in nodes if missing[node.name]]
    if bad:
        yield book.finding(
            "cpu-not-on-node",
            Severity.ERROR,
            case="node" if len(bad) == 1 else "nodes",
            level=name,
            instructions=and_more(missing[bad[0].name], MAX_SHOWN),
            nodes=_names(bad, models=True),
            shared=_shared(nodes)[0],
        )


def _above(machine: Machine, name: str) -> Iterator[Finding]:
    """A note where the ops are compiled for a level that this machine itself cannot run."""
    missing = lacking(name, machine.system)
    if missing and machine.system.cpu_flags:
        lost = and_more(missing, MAX_SHOWN)
        yield book.finding("cpu-above-this-machine", Severity.NOTE, case="build", level=name, instructions=lost)


def _unknown(compiler: Compiler | None, name: str) -> Iterator[Finding]:
    """An error where the compiler does not know the level."""
    level = next((level for level in LEVELS if level.name == name), None)
    oldest = getattr(level, compiler.kind, 0) if level and compiler else 0
    if compiler and compiler.major < oldest:
        yield book.finding(
            "cpu-unknown-to-compiler",
            Severity.ERROR,
            evidence=[f"compiler: {compiler.path}"],
            compiler=name_of(compiler),
            level=name,
            oldest=f"{compiler.kind} {oldest}",
        )


def _names(nodes: Sequence[Node], *, models: bool = False) -> str:
    shown = [
        f"{node.name} ({node.system.cpu_model})" if models and node.system.cpu_model else node.name for node in nodes
    ]
    return and_more(shown, MAX_SHOWN)
