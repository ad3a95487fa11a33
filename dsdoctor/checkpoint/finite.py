"""Bytes of floating-point numbers -> which are nan or inf. Without torch or numpy, at some hundred megabytes a second.

A number is nan or inf where all bits of its exponent are set. Those bits lie in the two highest bytes of each number, which are
sliced out, translated to 0 and 1, and compared as one long integer.
"""

import math
import struct
from collections.abc import Iterator

ONE = b"\x01"
HIGH = bytes(byte & 0x7F == 0x7F for byte in range(256))
"""Sign, then seven bits of the exponent: float32, bfloat16 and float64."""
TOP_BIT = bytes(byte >= 0x80 for byte in range(256))
TOP_FOUR = bytes(byte >= 0xF0 for byte in range(256))
HALF = bytes(byte & 0x7C == 0x7C for byte in range(256))
ALL = bytes([1]) * 256
SIGNS: dict[str, tuple[int, bytes, bytes]] = {
    "F32": (4, HIGH, TOP_BIT),
    "BF16": (2, HIGH, TOP_BIT),
    "F64": (8, HIGH, TOP_FOUR),
    "F16": (2, HALF, ALL),
}
"""Type -> bytes of a number, the test of its highest byte, the test of the one below."""


def not_finite(content: bytes, dtype: str) -> Iterator[tuple[int, str]]:
    """Each number that is nan or inf: its place, and which. Nothing for types that have neither.

    >>> import struct
    >>> list(not_finite(struct.pack("<4f", 1.0, float("nan"), 3e38, float("-inf")), "F32"))
    [(1, 'nan'), (3, 'inf')]
    """
    if dtype not in SIGNS:
        return
    width, high, low = SIGNS[dtype]
    first = content[width - 1 :: width].translate(high)
    if ONE not in first:
        return
    second = content[width - 2 :: width].translate(low)
    count = len(first)
    both = int.from_bytes(first, "little") & int.from_bytes(second[:count], "little")
    hits = both.to_bytes(count, "little")
    place = hits.find(ONE)
    while place >= 0:
        yield place, _which(content[place * width : (place + 1) * width], dtype)
        place = hits.find(ONE, place + 1)


def _which(number: bytes, dtype: str) -> str:
    if dtype == "BF16":
        number, dtype = b"\0\0" + number, "F32"
    value = struct.unpack({"F32": "<f", "F64": "<d", "F16": "<e"}[dtype], number)[0]
    return "nan" if math.isnan(value) else "inf"
