"""Compiler flags -> the instructions that the compiler may use, and which of them a processor lacks. Pure, x86 and Arm (64 bit).

Names of instructions are gcc's: its -m options on x86 ("-mavx2"), the extensions of -march on Arm ("+sve"). Those of a
processor are the kernel's in /proc/cpuinfo ("flags" on x86: arch/x86/include/asm/cpufeatures.h; "Features" on Arm:
arch/arm64/kernel/cpuinfo.c). Instructions that no compiler uses by itself (AES, SHA, CRC, RDRAND ...) are left out:
code that uses them checks the processor first.
"""

from collections.abc import Iterable, Iterator

FEATURES = {
    "-msse3": "pni",
    "-mssse3": "ssse3",
    "-msse4.1": "sse4_1",
    "-msse4.2": "sse4_2",
    "-mpopcnt": "popcnt",
    "-mmovbe": "movbe",
    "-mavx": "avx",
    "-mavx2": "avx2",
    "-mfma": "fma",
    "-mfma4": "fma4",
    "-mf16c": "f16c",
    "-mbmi": "bmi1",
    "-mbmi2": "bmi2",
    "-mlzcnt": "abm",
    "-mavx512f": "avx512f",
    "-mavx512bw": "avx512bw",
    "-mavx512cd": "avx512cd",
    "-mavx512dq": "avx512dq",
    "-mavx512vl": "avx512vl",
    "-mavx512ifma": "avx512ifma",
    "-mavx512vbmi": "avx512vbmi",
    "-mavx512vbmi2": "avx512_vbmi2",
    "-mavx512vnni": "avx512_vnni",
    "-mavx512bitalg": "avx512_bitalg",
    "-mavx512vpopcntdq": "avx512_vpopcntdq",
    "-mavx512bf16": "avx512_bf16",
    "-mavx512fp16": "avx512_fp16",
    "-mavxvnni": "avx_vnni",
    "+simd": "asimd",
    "+lse": "atomics",
    "+rdma": "asimdrdm",
    "+rcpc": "lrcpc",
    "+fcma": "fcma",
    "+dotprod": "asimddp",
    "+rcpc2": "ilrcpc",
    "+fp16": "asimdhp",
    "+fp16fml": "asimdfhm",
    "+bf16": "bf16",
    "+i8mm": "i8mm",
    "+mops": "mops",
    "+cssc": "cssc",
    "+sve": "sve",
    "+sve2": "sve2",
    "+f32mm": "svef32mm",
    "+f64mm": "svef64mm",
}
V2 = ("-msse3", "-mssse3", "-msse4.1", "-msse4.2", "-mpopcnt")
V3 = (*V2, "-mavx", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
V4 = (*V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
SANDYBRIDGE = (*V2, "-mavx")
ARM_8 = ("+simd",)
ARM_8_1 = (*ARM_8, "+lse", "+rdma")
ARM_8_3 = (*ARM_8_1, "+rcpc", "+fcma")
ARM_8_4 = (*ARM_8_3, "+dotprod", "+rcpc2")
ARM_8_6 = (*ARM_8_4, "+bf16", "+i8mm")
ARM_8_8 = (*ARM_8_6, "+mops")
ARM_8_9 = (*ARM_8_8, "+cssc")
SVE = ("+fp16", "+sve")
SVE2 = (*SVE, "+sve2")
ANY_V8_2 = (*ARM_8_1, "+fp16", "+dotprod", "+rcpc")
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
    "armv8-a": ARM_8,
    **dict.fromkeys(("armv8.1-a", "armv8.2-a"), ARM_8_1),
    "armv8.3-a": ARM_8_3,
    **dict.fromkeys(("armv8.4-a", "armv8.5-a"), ARM_8_4),
    **dict.fromkeys(("armv8.6-a", "armv8.7-a"), ARM_8_6),
    "armv8.8-a": ARM_8_8,
    "armv8.9-a": ARM_8_9,
    "armv9-a": (*ARM_8_4, *SVE2),
    **dict.fromkeys(("armv9.1-a", "armv9.2-a"), (*ARM_8_6, *SVE2)),
    "armv9.3-a": (*ARM_8_8, *SVE2),
    "armv9.4-a": (*ARM_8_9, *SVE2),
}
"""The instructions that a name includes at least. Names are the levels of the x86-64 psABI, the versions of the Arm
architecture, and processors by the level that they have (gcc's manual, "x86 Options" and "AArch64
Options"). gcc writes single -m options down only for -march=native; on Arm it writes that as a version with extensions."""

MCPU = {
    **dict.fromkeys(("cortex-a53", "cortex-a57", "cortex-a72", "cortex-a73"), ARM_8),
    "thunderx2t99": ARM_8_1,
    **dict.fromkeys(("cortex-a55", "cortex-a75", "cortex-a76", "cortex-a77", "cortex-a78", "neoverse-n1"), ANY_V8_2),
    "a64fx": (*ARM_8_1, *SVE),
    "tsv110": (*ARM_8_1, "+fp16"),
    **dict.fromkeys(("neoverse-v1", "neoverse-512tvb"), (*ARM_8_4, *SVE, "+bf16", "+i8mm")),
    **dict.fromkeys(("neoverse-n2", "neoverse-n3", "neoverse-v2", "neoverse-v3", "grace"), (*ARM_8_6, *SVE2)),
    **dict.fromkeys(("ampere1", "ampere1a", "ampere1b"), ARM_8_6),
}
"""Processors that Arm's -mcpu names; x86 has none."""

BRINGS = {
    "+fp16fml": ("+fp16",),
    "+sve": SVE,
    "+sve2": SVE2,
    **dict.fromkeys(("+sve2-aes", "+sve2-bitperm", "+sve2-sha3", "+sve2-sm4"), SVE2),
    **dict.fromkeys(("+f32mm", "+f64mm"), SVE),
}
"""The extensions that another one includes; removing one of them removes that other one too."""


def lacking_instructions(compiled: Iterable[str], processor: frozenset[str]) -> tuple[str, ...]:
    """The instructions that compiler options allow and the processor lacks.

    >>> lacking_instructions(("-march=somelake", "-mavx2", "-mavx512f"), frozenset({"avx2"}))
    ('-mavx512f',)
    >>> lacking_instructions(("-march=skylake-avx512",), frozenset())[-1]
    '-mavx512vl'
    >>> lacking_instructions(("-march=x86-64-v2",), frozenset({"pni", "ssse3", "sse4_1", "sse4_2"}))
    ('-mpopcnt',)
    >>> lacking_instructions(("-march=armv8.2-a+sve",), frozenset({"asimd", "atomics", "asimdrdm", "asimdhp"}))
    ('+sve',)
    """
    used = dict.fromkeys(name for flag in compiled for name in _allowed_by(flag))
    return tuple(name for name in used if FEATURES[name] not in processor)


def instructions_of(processor: frozenset[str]) -> tuple[str, ...]:
    """What a compiler may use for this very processor (-march=native).

    >>> instructions_of(frozenset({"fpu", "avx2", "aes"}))
    ('-mavx2',)
    """
    return tuple(name for name, feature in FEATURES.items() if feature in processor)


def says_nothing(compiled: Iterable[str]) -> bool:
    """Whether flags do not say which instructions are used: there are none, or they only name an unknown processor.

    >>> says_nothing(("-march=somelake",)), says_nothing(("-march=somelake", "-mavx2")), says_nothing(())
    (True, False, True)
    >>> says_nothing(("-mcpu=neoverse-n1+crypto",)), says_nothing(("-mcpu=someverse",))
    (False, True)
    """
    flags = tuple(compiled)
    single = any(flag.startswith("-m") and not flag.startswith(("-march=", "-mcpu=")) for flag in flags)
    return not single and not any(_known(flag) is not None for flag in flags)


def _allowed_by(flag: str) -> Iterator[str]:
    """The instructions that one option allows."""
    allowed = dict.fromkeys((*(_known(flag) or ()), flag))
    for extension in flag.split("+")[1:] if flag.startswith(("-march=", "-mcpu=")) else ():
        if extension.startswith("no"):
            gone = f"+{extension.removeprefix('no')}"
            allowed = {name: None for name in allowed if gone not in (name, *BRINGS.get(name, ()))}
        else:
            allowed |= dict.fromkeys((*BRINGS.get(f"+{extension}", ()), f"+{extension}"))
    yield from (name for name in allowed if name in FEATURES)


def _known(flag: str) -> tuple[str, ...] | None:
    """The instructions of the name in -march or -mcpu, None for an unknown name."""
    kind, _, name = flag.partition("=")
    table = {"-march": MARCH, "-mcpu": MCPU}.get(kind, {})
    return table.get(name.split("+")[0])
