"""GPU architectures and a processor's instructions: lists as users and compilers write them. Pure.

An architecture list becomes the one that torch *and* DeepSpeed accept, or an error that says why not. The rules are torch's
``_get_cuda_arch_flags`` (names and numbers, ``+PTX``) cut down to what DeepSpeed's ``compute_capability_args`` can read: numbers
"X.Y" with an optional "+PTX".

Compiler flags become the instructions that the compiler may use, and those of them that a processor lacks (x86, and Arm in 64 bit).
Names of instructions are gcc's: its -m options on x86 ("-mavx2"), the extensions of -march on Arm ("+sve"). Those of a processor
are the kernel's in /proc/cpuinfo ("flags" on x86: arch/x86/include/asm/cpufeatures.h; "Features" on Arm:
arch/arm64/kernel/cpuinfo.c). Instructions that no compiler uses by itself (AES, SHA, CRC, RDRAND ...) are left out: code that uses
them checks the processor first.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from dsdoctor.core.errors import UsageError

KNOWN = (
    *("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.8", "8.9"),
    *("9.0", "10.0", "10.1", "10.3", "10.7", "11.0", "12.0", "12.1"),
)
"""Compute capabilities that NVIDIA has named, for the ops' own filters."""
OLDEST = {11: "3.5", 12: "5.0", 13: "7.5"}
"""The oldest architecture that the nvcc of a CUDA major compiles for (NVIDIA's release notes)."""
ENTRY = re.compile(r"(\d{1,2})\.(\d)(\+PTX)?")
NAMED = {
    "volta": ("7.0",),
    "turing": ("7.5",),
    "ampere": ("8.0", "8.6"),
    "ada": ("8.9",),
    "hopper": ("9.0",),
    "blackwell": ("10.0", "10.3", "12.0", "12.1"),
}
HINT = 'write numbers with ";" between them, such as --arch "8.0;9.0+PTX"'
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


def parse_architectures(text: str) -> tuple[str, ...]:
    """Read a list, sorted and without repeats; an entry with +PTX replaces the same one without.

    >>> parse_architectures("9.0+PTX; 8.0 9.0")
    ('8.0', '9.0+PTX')
    >>> parse_architectures("sm_90")
    Traceback (most recent call last):
    dsdoctor.core.errors.UsageError: architecture 'sm_90' is nvcc's spelling, torch and DeepSpeed read '9.0'
    """
    entries = [entry for entry in re.split(r"[;\s]+", text.strip()) if entry]
    if not entries:
        raise UsageError("the architecture list is empty", hint=HINT)
    kept: dict[str, str] = {}
    for entry in entries:
        _check(entry)
        number = entry.removesuffix("+PTX")
        kept[number] = entry if entry.endswith("+PTX") else kept.get(number, entry)
    return tuple(sorted(kept.values(), key=order))


def check_known(architectures: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for an entry that this torch does not know (``known`` empty: nothing is checked)."""
    for entry in architectures:
        if known and plain(entry) not in known:
            near = [name for name in known if name.split(".")[0] == entry.split(".")[0] and name[-1].isdigit()]
            raise UsageError(
                f"architecture {entry!r} is unknown to this torch",
                hint=f"it knows {', '.join(near or [name for name in known if name[-1].isdigit()])}",
            )


def compiled_by(architecture: str, listed: Sequence[str], cuda_major: int) -> bool:
    """Whether an nvcc compiles for an architecture: by its own list, else by what is known of its major.

    >>> compiled_by("7.0", (), 13), compiled_by("9.0+PTX", ("8.0", "9.0"), 12)
    (False, True)
    """
    if listed:
        return plain(architecture) in listed
    return order(architecture) >= order(OLDEST.get(cuda_major, "0.0"))


def plain(entry: str) -> str:
    """The number alone.

    >>> plain("9.0+PTX")
    '9.0'
    """
    return entry.removesuffix("+PTX")


def only(architectures: Sequence[str], kept: Sequence[str] | None) -> tuple[str, ...]:
    """The entries that an op's own filter keeps.

    >>> only(("7.5", "8.0+PTX"), ("8.0", "9.0"))
    ('8.0+PTX',)
    """
    return tuple(entry for entry in architectures if kept is not None and plain(entry) in kept)


def numeric(names: Sequence[str]) -> tuple[str, ...]:
    """The plain numbers among capability names, in order.

    >>> numeric(("12.0", "9.0a", "9.0"))
    ('9.0', '12.0')
    """
    return tuple(sorted({name for name in names if ENTRY.fullmatch(name)}, key=order))


def order(entry: str) -> tuple[int, int]:
    """Major and minor as numbers, for sorting and comparing."""
    major, minor = plain(entry).split(".")
    return int(major), int(minor)


def _check(entry: str) -> None:
    if ENTRY.fullmatch(entry):
        return
    spelt = re.fullmatch(r"(?:sm|compute)?_?(\d{1,2})(\d)([a-z]?)(\+PTX)?", entry)
    suffixed = re.fullmatch(r"(\d{1,2}\.\d)([a-zA-Z])(\+PTX)?", entry)
    if "," in entry:
        raise UsageError(f"architecture list {entry!r} has a comma, torch separates with ';'", hint=HINT)
    if suffixed:
        raise UsageError(
            f"architecture {entry!r} has a suffix, DeepSpeed reads numbers only",
            hint=f"write {suffixed[1]!r}: DeepSpeed's kernels use none of the {suffixed[2]!r} instructions",
        )
    if spelt:
        raise UsageError(
            f"architecture {entry!r} is nvcc's spelling, torch and DeepSpeed read {f'{spelt[1]}.{spelt[2]}'!r}",
            hint=HINT,
        )
    if entry.lower().removesuffix("+ptx") in NAMED:
        numbers = ";".join(NAMED[entry.lower().removesuffix("+ptx")])
        raise UsageError(f"architecture {entry!r} is a name, DeepSpeed reads numbers only", hint=f'--arch "{numbers}"')
    raise UsageError(f"architecture {entry!r} is not a compute capability", hint=HINT)


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
