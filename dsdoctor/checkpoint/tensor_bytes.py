"""Bytes of floating-point numbers -> bytes of another type, bit for bit as torch does it. Without torch or numpy."""

import functools
import struct

from dsdoctor.checkpoint.finite import not_finite
from dsdoctor.checkpoint.inert import ITEM_SIZES

FORMATS = {"F32": "f", "F64": "d", "F16": "e"}
QUIET_NAN = b"\x00\x00\xc0\x7f"
FEW = 1 << 16
"""Numbers that are made Python's own at once."""


def float_types() -> frozenset[str]:
    """Types that are converted to the one of the merged model."""
    return frozenset({*FORMATS, "BF16"})


def can_convert(dtype: str, made: str) -> bool:
    """Whether numbers of a type can be written as another."""
    return (dtype == made and dtype in ITEM_SIZES) or (dtype in float_types() and made in {"F32", "BF16"})


def converted(content: bytes, dtype: str, made: str) -> bytes:
    """The same numbers in another type, rounded to the nearest, to even where two are as near.

    >>> import struct
    >>> converted(struct.pack("<2f", 1.0, 3.1415927), "F32", "BF16").hex()
    '803f4940'
    >>> struct.unpack("<f", converted(b"\\x80\\x3f", "BF16", "F32"))
    (1.0,)
    """
    if dtype == made:
        return content
    single = content if dtype == "F32" else _from_bf16(content) if dtype == "BF16" else _from_other(content, dtype)
    return single if made == "F32" else _to_bf16(single)


def _from_bf16(content: bytes) -> bytes:
    made = bytearray(2 * len(content))
    made[2::4], made[3::4] = content[0::2], content[1::2]
    return bytes(made)


def _from_other(content: bytes, dtype: str) -> bytes:
    width, made = ITEM_SIZES[dtype], []
    for start in range(0, len(content), width * FEW):
        part = content[start : start + width * FEW]
        numbers = struct.unpack(f"<{len(part) // width}{FORMATS[dtype]}", part)
        made.append(b"".join(map(_single, numbers)))
    return b"".join(made)


def _single(number: float) -> bytes:
    try:
        return struct.pack("<f", number)
    except OverflowError:
        return struct.pack("<f", float("inf") if number > 0 else float("-inf"))


def _to_bf16(content: bytes) -> bytes:
    """Half of the last bit that stays is added to all numbers at once, as one long integer: nothing runs over into the next,
    because nan is set aside before."""
    nans = [place for place, kind in not_finite(content, "F32") if kind == "nan"]
    if nans:
        changed = bytearray(content)
        for place in nans:
            changed[4 * place : 4 * place + 4] = QUIET_NAN
        content = bytes(changed)
    ones = _ones(len(content) // 4)
    numbers = int.from_bytes(content, "little")
    rounded = (numbers + ((numbers >> 16) & ones) + 0x7FFF * ones).to_bytes(len(content), "little")
    made = bytearray(len(content) // 2)
    made[0::2], made[1::2] = rounded[2::4], rounded[3::4]
    return bytes(made)


@functools.lru_cache(maxsize=2)
def _ones(count: int) -> int:
    return int.from_bytes(b"\1\0\0\0" * count, "little")
