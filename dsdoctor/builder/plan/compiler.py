"""Machine + toolkit -> the host compiler that both nvcc and torch accept. Pure."""

from dataclasses import replace

from dsdoctor.core.build_models import Choice, ToolkitPlan
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.machine import Compiler, Machine, Toolkit, compiler_limits, fits, newest_compiler


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
        because = "it is the default here, and " + _accepted(limits[default.kind], toolkit, device_code=device_code)
        return default, (_choice(default, because),), ()
    chosen = max(fitting, key=lambda compiler: (compiler.kind == "gcc", compiler.version))
    because = f"the default {default.path} {version_of(default)} is refused, and " + _accepted(
        limits[chosen.kind], toolkit, device_code=device_code
    )
    return chosen, (_choice(chosen, because),), ()


def _limits(machine: Machine, toolkit: ToolkitPlan | None, kind: str) -> tuple[int, int | None]:
    """The oldest and the newest major that may be used; None for the newest where no limit is known."""
    assert machine.torch is not None
    if toolkit is None:
        return compiler_limits(machine.torch, kind, ())
    known = [known for known in machine.toolkits if _is_or_feeds(known, toolkit)]
    # an assembled toolkit does not exist yet: its release tells, with torch's own table of compilers and what is known of its nvcc
    planned = Toolkit(root=toolkit.root, release=toolkit.release)
    if toolkit.fetches:
        newest = {name: newest_compiler(toolkit.release, name) for name in ("gcc", "clang")}
        planned = replace(planned, newest_gcc=newest["gcc"], newest_clang=newest["clang"])
    return compiler_limits(machine.torch, kind, [*known, planned])


def _is_or_feeds(known: Toolkit, toolkit: ToolkitPlan) -> bool:
    return known.root == toolkit.root or (toolkit.assemble and known.release == toolkit.release)


def _accepted(limits: tuple[int, int | None], toolkit: ToolkitPlan | None, *, device_code: bool) -> str:
    by_torch = f"torch's headers need at least {limits[0]}"
    if device_code and toolkit is not None and limits[1] is not None:
        return f"{by_torch}, nvcc {toolkit.release} takes up to {limits[1]}"
    return by_torch


def _nothing_fits(machine: Machine, toolkit: ToolkitPlan | None, gcc: tuple[int, int | None]) -> Finding:
    oldest, newest = gcc
    package = "g++" if newest is None else f"g++-{newest}"
    seen = [f"{compiler.path}: {_kind_and_version(compiler)}" for compiler in machine.compilers]
    here = ", ".join(map(_kind_and_version, machine.compilers[:1]))
    if not machine.compilers:
        rule, title = "host-compiler-missing", "no C++ compiler: neither g++ nor clang++ on PATH compiles"
    elif newest is not None and all(compiler.major > newest for compiler in machine.compilers):
        release = toolkit.release if toolkit else ""
        rule, title = (
            "host-compiler-too-new",
            f"nvcc {release} takes gcc up to {newest}, here is {here}",
        )
    else:
        rule, title = (
            "host-compiler-too-old",
            f"torch's headers need gcc {oldest} or newer, here is {here}",
        )
    return Finding.error(
        rule,
        title,
        evidence=seen,
        fix="install one; dsdoctor will choose it by itself, no link is needed",
        steps=(
            step("sudo apt-get install {package}", package=package),
            instead("sudo dnf install gcc-toolset"),
            instead("conda install gxx_linux-64"),
        ),
    )


def _choice(compiler: Compiler, because: str) -> Choice:
    return Choice(what="compiler", value=f"{compiler.path} ({_kind_and_version(compiler)})", because=because)


def _kind_and_version(compiler: Compiler) -> str:
    return f"{compiler.kind} {version_of(compiler)}"


def version_of(compiler: Compiler) -> str:
    """A compiler's version as text, such as "12.2.0"."""
    return ".".join(map(str, compiler.version))
