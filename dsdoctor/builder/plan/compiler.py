"""The host compiler of a build: one that both nvcc and torch accept. Pure."""

from dataclasses import replace

from dsdoctor.core.build_models import Choice, ToolkitPlan
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Compiler, Machine, Toolkit, compiler_limits, fits, newest_compiler
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
        because = "the default compiler; " + _accepted(limits[default.kind], toolkit, device_code=device_code)
        return default, (_choice(default, because),), ()
    chosen = max(fitting, key=lambda compiler: (compiler.kind == "gcc", compiler.version))
    because = f"the default {default.path} {version_of(default)} is not supported; " + _accepted(
        limits[chosen.kind], toolkit, device_code=device_code
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
    by_torch = f"torch's headers need at least {limits[0]}"
    if device_code and toolkit is not None and limits[1] is not None:
        return f"{by_torch}, nvcc {toolkit.release} supports up to {limits[1]}"
    return by_torch


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
