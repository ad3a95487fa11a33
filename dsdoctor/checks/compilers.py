"""Machine -> findings about the host compiler: what nvcc supports, and what torch's headers need."""

from collections.abc import Iterator

from dsdoctor.checks.advice import USE_ENV
from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.machine import Compiler, Machine, compiler_limits, fits


def summary(machine: Machine) -> str:
    """One line for the topic."""
    if not machine.compilers:
        return "C++ compiler: none"
    first, *others = machine.compilers
    return f"C++ compiler {name(first)}" + (f"; also {', '.join(map(name, others[:4]))}" if others else "")


def name(compiler: Compiler) -> str:
    """Kind, version and path."""
    return f"{compiler.kind} {'.'.join(map(str, compiler.version))} ({compiler.path})"


def host_compiler_missing(machine: Machine) -> Iterator[Finding]:
    """There is no C++ compiler that works: none on PATH, or one whose back end (cc1plus) is missing.

    Why it matters: Neither pip nor the run-time loader can compile any op, CUDA or not. A wheel that holds the ops
    needs no compiler.

    How to fix it: Install one (Fedora, RHEL: gcc-c++; conda: gxx_linux-64).

        $ sudo apt-get install g++

    Since: 0.1
    """
    if not machine.compilers:
        yield Finding.error(
            "host-compiler-missing",
            "no C++ compiler: neither g++ nor clang++ on PATH works",
            affects=(needs.COMPILER,),
            fix="install one",
            steps=(
                step("sudo apt-get install g++"),
                instead("sudo dnf install gcc-c++"),
                instead("conda install gxx_linux-64"),
            ),
        )


def host_compiler_too_new(machine: Machine) -> Iterator[Finding]:
    """The host compiler is newer than this nvcc takes.

    nvcc hands host code to it and refuses releases it does not know (crt/host_config.h says which); torch checks the
    same. `-allow-unsupported-compiler` lets nvcc try, at your risk.

    Why it matters: No CUDA op can be compiled.

    How to fix it: Install an older g++ beside the newer one, and let CC and CXX name it; nothing needs to be removed.

        $ sudo apt-get install g++-12
        $ eval "$(python -m dsdoctor env)"

    Since: 0.1
    """
    default, limits = _default_and_limits(machine)
    if default is None or limits[1] is None or default.major <= limits[1]:
        return
    taken = machine.taken
    other = _fitting(machine, limits)
    yield Finding.error(
        "host-compiler-too-new",
        f"nvcc {taken.release if taken else ''} takes {default.kind} up to {limits[1]}, here is {name(default)}",
        evidence=[f"{taken.root}/include/crt/host_config.h" if taken else "torch's own table"],
        affects=(needs.DEVICE_CODE,),
        fix=f"use {name(other)}" if other else f"install {default.kind} {limits[1]}; nothing needs to be removed",
        steps=(USE_ENV,) if other else (step("sudo apt-get install g++-{release}", release=limits[1]), USE_ENV),
    )


def host_compiler_too_old(machine: Machine) -> Iterator[Finding]:
    """The host compiler is too old for the headers of this torch, which decide on the C++ standard.

    C++17 since torch 2.1 needs gcc 9, C++20 since torch 2.14 needs gcc 10.

    Why it matters: No op can be compiled, CUDA or not.

    How to fix it: Install a newer one beside it. On clusters one is usually a module away.

        $ sudo apt-get install g++-12
        $ eval "$(python -m dsdoctor env)"

    Since: 0.1
    """
    default, limits = _default_and_limits(machine)
    if default is None or default.major >= limits[0] or machine.torch is None:
        return
    other = _fitting(machine, limits)
    yield Finding.error(
        "host-compiler-too-old",
        f"torch {machine.torch.version}'s headers (C++{machine.torch.cxx_standard}) need {default.kind} {limits[0]} or newer, "
        f"the compiler is {name(default)}",
        affects=(needs.COMPILER,),
        fix=f"use {name(other)}" if other else "install a newer one beside it",
        steps=(USE_ENV,)
        if other
        else (
            step("sudo apt-get install g++-12"),
            instead("sudo dnf install gcc-toolset-12"),
            instead("conda install gxx_linux-64"),
            instead("module load gcc", note="on many clusters"),
        ),
    )


def compilers_differ(machine: Machine) -> Iterator[Finding]:
    """C++ files and nvcc's host code would be compiled by different compilers.

    torch compiles C++ with CXX and hands CC to nvcc as -ccbin; where CC is not set nvcc takes the gcc on PATH.

    Why it matters: Objects of two compilers, linked into one op, break at load time or later.

    How to fix it: Let CC and CXX name the same compiler.

        $ export CC=gcc-12 CXX=g++-12

    Since: 0.1
    """
    cc, cxx = machine.variables.get("CC"), machine.variables.get("CXX")
    if machine.taken is None or not machine.compilers or (not cc and not cxx):
        return
    default = machine.compilers[0]
    if cxx and not cc and default.found_via == "cxx_variable":
        on_path = next((compiler for compiler in machine.compilers if compiler.found_via == "path"), None)
        if on_path is not None and (on_path.kind, on_path.major) != (default.kind, default.major):
            yield _differ(f"CXX is {cxx} ({name(default)}), and CC is not set: nvcc takes {name(on_path)}", default)
    elif cc and cxx and default.c_path and cc.rsplit("/", 1)[-1] != default.c_path.rsplit("/", 1)[-1]:
        yield _differ(f"CXX is {cxx} and CC is {cc}: nvcc takes CC for its host code", default)


def _differ(title: str, default: Compiler) -> Finding:
    steps = (step("export CC={compiler}", compiler=default.c_path),) if default.c_path else (USE_ENV,)
    return Finding.warning("compilers-differ", title, fix="let CC and CXX name the same compiler", steps=steps)


def _fitting(machine: Machine, limits: tuple[int, int | None]) -> Compiler | None:
    """Another compiler here that is within the limits and has its C compiler beside it."""
    return next((compiler for compiler in machine.compilers if compiler.c_path and fits(compiler, limits)), None)


def _default_and_limits(machine: Machine) -> tuple[Compiler | None, tuple[int, int | None]]:
    """The compiler that a build would take first, and the oldest and newest major that it may have."""
    if not machine.compilers or machine.torch is None:
        return None, (0, None)
    default = machine.compilers[0]
    taken = (machine.taken,) if machine.taken and machine.torch.cuda else ()
    return default, compiler_limits(machine.torch, default.kind, taken)


CHECKS = (host_compiler_missing, host_compiler_too_new, host_compiler_too_old, compilers_differ)
