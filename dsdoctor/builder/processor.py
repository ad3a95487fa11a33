"""The processor that host code is compiled for -> gcc's -march and DeepSpeed's SIMD macro, and why. Pure.

DeepSpeed compiles ``cpu_adam`` and its like with -march=native and chooses the macro by the machine that it builds on; the two must
agree. The levels are those of the x86-64 psABI.
"""

from dsdoctor.builder.nouns import Choice, Wish
from dsdoctor.errors import UsageError
from dsdoctor.machine import Machine

NATIVE = "native"
LEVELS = {"x86-64-v2": "-D__SCALAR__", "x86-64-v3": "-D__AVX256__", "x86-64-v4": "-D__AVX512__"}
"""DeepSpeed's simd.h has code for AVX2 (with FMA and F16C, which v3 has) and AVX512 (F, BW, DQ, VL, which v4 has)."""


def choose_processor(machine: Machine, wish: Wish) -> tuple[str, Choice]:
    """NATIVE or a level. Raises UsageError for one that is none, or of another architecture than this machine's."""
    asked = wish.cpu or NATIVE
    level = f"x86-64-{asked}" if f"x86-64-{asked}" in LEVELS else asked
    if level != NATIVE and level not in LEVELS:
        raise UsageError(f"--cpu {asked!r} is none", hint=f"it takes native, {', '.join(LEVELS)}")
    if level != NATIVE and machine.system.architecture != "x86_64":
        raise UsageError(
            f"--cpu {level} is of x86-64, and this machine is {machine.system.architecture}", hint="--cpu native"
        )
    because = (
        "--cpu"
        if wish.cpu
        else "DeepSpeed's own choice: this very processor; --cpu x86-64-v3 makes a wheel for others too"
    )
    return level, Choice(what="processor", value=level, because=because)


def flags_of(processor: str) -> tuple[str, ...]:
    """What takes the place of DeepSpeed's own flags: none for NATIVE.

    >>> flags_of("x86-64-v3")
    ('-march=x86-64-v3', '-D__AVX256__')
    """
    return (f"-march={processor}", LEVELS[processor]) if processor in LEVELS else ()
