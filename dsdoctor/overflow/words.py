"""The words of a verdict: short, exact, the same everywhere. Pure text."""

import math
from collections.abc import Iterable

from dsdoctor.overflow.account import Account
from dsdoctor.overflow.frames.first_bad import Culprit
from dsdoctor.overflow.frames.frame import Frame, TensorStats
from dsdoctor.overflow.frames.guide_format import item_line

MOST_NAMES = 3


def where(frame: Frame | None) -> str:
    """A module by name and class.

    >>> where(Frame(batch=0, order=0, module="blocks.1.up", kind="Linear", tensors=(), call=1))
    'blocks.1.up (Linear, call 2)'
    """
    if frame is None:
        return "the model"
    again = f", call {frame.call + 1}" if frame.call else ""
    return f"{frame.module or 'the model'} ({frame.kind}{again})"


def amount(tensor: TensorStats) -> str:
    """How much of what is bad.

    >>> amount(TensorStats(name="output", dtype="float16", shape=(4,), count=4, nan=1, neginf=2))
    '1 nan and 2 -inf of 4'
    """
    kinds = ((tensor.nan, "nan"), (tensor.posinf, "inf"), (tensor.neginf, "-inf"))
    return " and ".join(f"{many} {name}" for many, name in kinds if many) + f" of {tensor.count}"


def moment(account: Account) -> str:
    """Which batch: optimizer step, micro-batch in it, and the guide's number."""
    frame = account.culprit.frame if account.culprit is not None else None
    micro, batch = (frame.micro, frame.batch) if frame is not None else (account.micro, account.batch)
    return f"step {account.step}, micro-batch {micro}, batch_number={batch}"


def what_is_bad(culprit: Culprit) -> list[str]:
    """The frame of the culprit in the guide's columns."""
    return [item_line(item) for item in culprit.frame.tensors]


def ranks_say(ranks: tuple[int, ...], world: int) -> str:
    """Who shares it, and what that means.

    >>> ranks_say((1,), 4), ranks_say((0, 1), 2), ranks_say((0,), 1)
    (', on rank 1 of 4 only: its data or its hardware', ', on all 2 ranks: the model', '')
    """
    if world < 2 or not ranks:
        return ""
    if len(ranks) == 1:
        return f", on rank {ranks[0]} of {world} only: its data or its hardware"
    if len(ranks) == world:
        return f", on all {world} ranks: the model"
    return f", on ranks {', '.join(map(str, ranks))} of {world}"


def gradient_names(accounts: Iterable[Account]) -> str:
    """The parameters whose gradients are bad, a few of them.

    >>> gradient_names([])
    ''
    """
    names = sorted({one.name for account in accounts for one in account.named if one.is_bad})
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def near(value: float) -> str:
    """A scale as a power of two, rounded down.

    >>> near(65536.0), near(3000.0), near(0.5)
    ('2^16', '2^11', '2^-1')
    """
    return f"2^{math.floor(math.log2(value))}"
