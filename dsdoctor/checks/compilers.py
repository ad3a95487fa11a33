"""Machine -> findings about the host compiler: what nvcc supports, and what torch's headers need."""

from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Compiler, Machine, compiler_limits, fits
from dsdoctor.rules import book


def summary(machine: Machine) -> str:
    """One line for the topic."""
    if not machine.compilers:
        return "C++ compiler: none"
    first, *others = machine.compilers
    return f"C++ compiler {_name(first)}" + (f"; also {', '.join(map(_name, others[:4]))}" if others else "")


def host_compiler_missing(machine: Machine) -> Iterator[Finding]:
    """There is no C++ compiler that works: none on PATH, or one whose back end (cc1plus) is missing."""
    if not machine.compilers:
        yield book.finding("host-compiler-missing", Severity.ERROR, affects=(needs.COMPILER,))


def host_compiler_too_new(machine: Machine) -> Iterator[Finding]:
    """The host compiler is newer than this nvcc takes."""
    default, limits = _default_and_limits(machine)
    if default is None or limits[1] is None or default.major <= limits[1]:
        return
    taken = machine.taken
    other = _fitting(machine, limits)
    yield book.finding(
        "host-compiler-too-new",
        Severity.ERROR,
        case="here" if other else "",
        evidence=[f"{taken.root}/include/crt/host_config.h" if taken else "torch's own table"],
        affects=(needs.DEVICE_CODE,),
        nvcc=str(taken.release) if taken else "",
        kind=default.kind,
        newest=limits[1],
        compiler=_name(default),
        other=_name(other) if other else "",
    )


def host_compiler_too_old(machine: Machine) -> Iterator[Finding]:
    """The host compiler is too old for the headers of this torch, which decide on the C++ standard."""
    default, limits = _default_and_limits(machine)
    if default is None or default.major >= limits[0] or machine.torch is None:
        return
    other = _fitting(machine, limits)
    yield book.finding(
        "host-compiler-too-old",
        Severity.ERROR,
        case="here" if other else "",
        affects=(needs.COMPILER,),
        torch=machine.torch.version,
        standard=machine.torch.cxx_standard,
        kind=default.kind,
        oldest=limits[0],
        compiler=_name(default),
        other=_name(other) if other else "",
    )


def compilers_differ(machine: Machine) -> Iterator[Finding]:
    """C++ files and nvcc's host code would be compiled by different compilers."""
    cc, cxx = machine.variables.get("CC"), machine.variables.get("CXX")
    if machine.taken is None or not machine.compilers or (not cc and not cxx):
        return
    default = machine.compilers[0]
    if cxx and not cc and default.found_via == "cxx_variable":
        on_path = next((compiler for compiler in machine.compilers if compiler.found_via == "path"), None)
        if on_path is not None and (on_path.kind, on_path.major) != (default.kind, default.major):
            yield book.finding(
                "compilers-differ",
                Severity.WARNING,
                case="cc-unset" if default.c_path else "cc-unset-no-c-compiler",
                cxx=cxx,
                compiler=_name(default),
                on_path=_name(on_path),
                c_compiler=default.c_path,
            )
    elif cc and cxx and default.c_path and cc.rsplit("/", 1)[-1] != default.c_path.rsplit("/", 1)[-1]:
        yield book.finding("compilers-differ", Severity.WARNING, cxx=cxx, cc=cc, c_compiler=default.c_path)


def _default_and_limits(machine: Machine) -> tuple[Compiler | None, tuple[int, int | None]]:
    """The compiler that a build would take first, and the oldest and newest major that it may have."""
    if not machine.compilers or machine.torch is None:
        return None, (0, None)
    default = machine.compilers[0]
    taken = (machine.taken,) if machine.taken and machine.torch.cuda else ()
    return default, compiler_limits(machine.torch, default.kind, taken)


def _fitting(machine: Machine, limits: tuple[int, int | None]) -> Compiler | None:
    """Another compiler here that is within the limits and has its C compiler beside it."""
    return next((compiler for compiler in machine.compilers if compiler.c_path and fits(compiler, limits)), None)


def _name(compiler: Compiler) -> str:
    """Kind, version and path."""
    return f"{compiler.kind} {'.'.join(map(str, compiler.version))} ({compiler.path})"


CHECKS = (host_compiler_missing, host_compiler_too_new, host_compiler_too_old, compilers_differ)
