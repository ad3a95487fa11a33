"""The largest packet that arrives, found by trying many sizes at the same time. Knows nothing of networks."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LEAST = 576
"""Every network that carries IPv4 lets through so many bytes (RFC 791); IPv6 asks for 1280."""
AT_ONCE = 16


def largest_that_arrives(arrives: Callable[[int], bool], most: int, *, until: float) -> int | None:
    """The most bytes below ``most``, which do not arrive, of which packets arrive; None where none of the first sizes does. The
    search ends early at ``until`` (monotonic), with the largest that was seen to arrive.

    >>> largest_that_arrives(lambda size: size <= 1400, 9000, until=time.monotonic() + 60)
    1400
    """
    low, high = LEAST - 1, most
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while high - low > 1 and time.monotonic() < until:
            sizes = sorted({low + max((high - low) * part // (AT_ONCE + 1), 1) for part in range(1, AT_ONCE + 1)})
            seen = dict(zip(sizes, pool.map(arrives, sizes), strict=True))
            good = [size for size, arrived in seen.items() if arrived]
            if not good and low < LEAST:
                return None
            low = max(good, default=low)
            high = min((size for size, arrived in seen.items() if not arrived and size > low), default=high)
    return low if low >= LEAST else None
