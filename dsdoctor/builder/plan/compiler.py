"""Machine + toolkit -> the host compiler that both nvcc and torch accept. Pure."""

from dsdoctor.core.build_models import Choice, ToolkitPlan
from dsdoctor.core.compatibility import compiler_limits, fits
from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.core.machine import Compiler, Machine, Toolkit


def choose_compiler(
    machine: Machine, toolkit: ToolkitPlan | None, *, device_code: bool
) -> tuple[Compiler | None, tuple[Choice, ...], tuple[Finding, ...]]:
    """The first compiler of the search order that fits, else the newest that does, else a finding."""
    limits = {kind: _limits(machine, toolkit if device_code else None, kind) for kind in ("gcc", "clang")}
    fitting = [c for c in machine.compilers if c.c_path and fits(c, limits[c.kind])]
    if not fitting:
        return None, (), (_nothingfits(machine, toolkit, limits["gcc"]),)
    default = machine.compilers[0]
    if fitting[0] == default:
        because = "it is the default here, and " + _accepted(limits[default.kind], toolkit, device_code=device_code)
        return default, (_choice(default, because),), ()
    chosen = max(fitting, key=lambda compiler: (compiler.kind == "gcc", compiler.version))
    because = f"the default {default.path} {_text(default)} is refused, and " + _accepted(
        limits[chosen.kind], toolkit, device_code=device_code
    )
    return chosen, (_choice(chosen, because),), ()


def _limits(machine: Machine, toolkit: ToolkitPlan | None, kind: str) -> tuple[int, int | None]:
    """Oldest and newest major that may be used (newest None: no limit known)."""
    assert machine.torch is not None
    if toolkit is None:
        return compiler_limits(machine.torch, kind, ())
    known = [one for one in machine.toolkits if _is_or_feeds(one, toolkit)]
    # an assembled toolkit is not here yet: its release alone lets torch's own table count
    return compiler_limits(machine.torch, kind, [*known, Toolkit(root=toolkit.root, release=toolkit.release)])


def _is_or_feeds(known: Toolkit, toolkit: ToolkitPlan) -> bool:
    return known.root == toolkit.root or (toolkit.assemble and known.release == toolkit.release)


def _accepted(limits: tuple[int, int | None], toolkit: ToolkitPlan | None, *, device_code: bool) -> str:
    by_torch = f"torch's headers need at least {limits[0]}"
    if device_code and toolkit is not None and limits[1] is not None:
        return f"{by_torch}, nvcc {toolkit.release} takes up to {limits[1]}"
    return by_torch


def _nothingfits(machine: Machine, toolkit: ToolkitPlan | None, gcc: tuple[int, int | None]) -> Finding:
    oldest, newest = gcc
    package = "g++" if newest is None else f"g++-{newest}"
    fix = Fix(
        text="install one; dsdoctor will choose it by itself, no link is needed",
        commands=(f"sudo apt-get install {package}  # Fedora, RHEL: gcc-toolset; conda: conda install gxx_linux-64",),
    )
    if not machine.compilers:
        title = "no C++ compiler: neither g++ nor clang++ on PATH compiles"
        return Finding(rule="host-compiler-missing", severity=Severity.ERROR, title=title, fix=fix)
    seen = [f"{compiler.path}: {compiler.kind} {_text(compiler)}" for compiler in machine.compilers]
    too_new = newest is not None and all(compiler.major > newest for compiler in machine.compilers)
    if too_new:
        release = toolkit.release if toolkit else ""
        title = f"nvcc {release} takes gcc up to {newest}, here is {seen[0].split(': ')[1]}"
        return Finding(
            rule="host-compiler-too-new", severity=Severity.ERROR, title=title, evidence=tuple(seen), fix=fix
        )
    title = f"torch's headers need gcc {oldest} or newer, here is {seen[0].split(': ')[1]}"
    return Finding(rule="host-compiler-too-old", severity=Severity.ERROR, title=title, evidence=tuple(seen), fix=fix)


def _choice(compiler: Compiler, because: str) -> Choice:
    return Choice(what="compiler", value=f"{compiler.path} ({compiler.kind} {_text(compiler)})", because=because)


def _text(compiler: Compiler) -> str:
    return ".".join(map(str, compiler.version))
