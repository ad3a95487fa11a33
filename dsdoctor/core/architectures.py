"""An architecture list as users write it -> the list that torch *and* DeepSpeed accept, or an error that says why not.

The rules are torch's ``_get_cuda_arch_flags`` (names and numbers, ``+PTX``) cut down to what DeepSpeed's
``compute_capability_args`` can read: numbers "X.Y" with an optional "+PTX".
"""

import re
from collections.abc import Sequence

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
                f"architecture {entry!r} is none that this torch knows",
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
    raise UsageError(f"architecture {entry!r} is no compute capability", hint=HINT)
