"""Compiler flags against a processor's flags: which instructions are used that the processor lacks. Pure, x86 only.

Names on the left are gcc's -m options, on the right those of /proc/cpuinfo (Linux, arch/x86/include/asm/cpufeatures.h).
Options that no compiler uses by itself (AES, SHA, RDRAND ...) are left out: code that has them asks the processor first.
"""

from collections.abc import Iterable

OPTIONS = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "movbe": "movbe",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "fma4": "fma4",
    "f16c": "f16c",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "lzcnt": "abm",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
}
V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt")
V3 = (*V2, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
SANDYBRIDGE = (*V2, "avx")
MARCH = {
    "x86-64": (),
    "x86-64-v2": V2,
    "x86-64-v3": V3,
    "x86-64-v4": V4,
    **dict.fromkeys(("nehalem", "westmere"), V2),
    **dict.fromkeys(("sandybridge", "ivybridge"), SANDYBRIDGE),
    **dict.fromkeys(("haswell", "broadwell", "skylake", "alderlake", "znver1", "znver2", "znver3"), V3),
    **dict.fromkeys(("skylake-avx512", "cascadelake", "cooperlake", "icelake-client", "icelake-server"), V4),
    **dict.fromkeys(("rocketlake", "tigerlake", "sapphirerapids", "graniterapids", "znver4", "znver5"), V4),
}
"""What a name stands for at the least: the levels of the x86-64 psABI, and processors by the level that they reach (gcc's manual,
"x86 Options"). gcc writes the single options down only for -march=native."""


def lacking_instructions(compiled: Iterable[str], processor: frozenset[str]) -> tuple[str, ...]:
    """The compiler options whose instructions the processor lacks.

    >>> lacking_instructions(("-march=somelake", "-mavx2", "-mavx512f"), frozenset({"avx2"}))
    ('-mavx512f',)
    >>> lacking_instructions(("-march=skylake-avx512",), frozenset())[-1]
    '-mavx512vl'
    >>> lacking_instructions(("-march=x86-64-v2",), frozenset({"pni", "ssse3", "sse4_1", "sse4_2"}))
    ('-mpopcnt',)
    """
    used: dict[str, None] = {}
    for flag in compiled:
        used |= dict.fromkeys(MARCH.get(flag.removeprefix("-march="), ()))
        used |= dict.fromkeys([flag.removeprefix("-m")] if flag.startswith("-m") else [])
    return tuple(f"-m{name}" for name in used if name in OPTIONS and OPTIONS[name] not in processor)


def says_nothing(compiled: Iterable[str]) -> bool:
    """Whether flags tell nothing of the instructions: there is none, or only the name of a processor that is not known here.

    >>> says_nothing(("-march=somelake",)), says_nothing(("-march=somelake", "-mavx2")), says_nothing(())
    (True, False, True)
    """
    flags = tuple(compiled)
    return not any(flag.startswith("-m") and not flag.startswith("-march=") for flag in flags) and not any(
        flag.removeprefix("-march=") in MARCH for flag in flags
    )
