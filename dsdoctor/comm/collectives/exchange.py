"""One step of a test on the ranks of torch.distributed's default group -> this rank's result, compared with the expected one.

Every rank does the same steps. Whose data is wrong: see ``blame``.
"""

import math
import re
from dataclasses import replace
from typing import Any, Protocol

from dsdoctor.comm.collectives.calls import Want
from dsdoctor.comm.collectives.catalogue import ExchangeStep
from dsdoctor.comm.collectives.values import CollectiveCall
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange, Wrong
from dsdoctor.comm.torch_ops import wait_for_device


class Progress(Protocol):
    """Hears how far a rank is."""

    def tell(self, step: int, at: str) -> None:
        """The step with this number (from 1) begins."""

    def skip(self, step: int, reason: str) -> None:
        """This rank leaves the step out. The others may wait for it there."""


NOT_HERE = re.compile(
    r"not (currently )?support|unsupported|not implemented|no (function|member) named|invalid scalar type"
    r"|cannot use reduceop|can't be cast|be contiguous|torch\.distributed has no",
    re.IGNORECASE,
)
BROKEN = re.compile(r"connect|timed? ?out|socket|peer|address|network|nccl error|cuda error", re.IGNORECASE)


def exchange(group: RankGroup, step: ExchangeStep, inverted: frozenset[int] = frozenset()) -> Exchange:
    """One step: run it, compare the result, and see that the input is still what it was."""
    call = step.call(group, inverted)
    mine = call.mine(step.collective.length(call))
    wait_for_device(group)
    try:
        got = step.collective.run(call, mine)
        wait_for_device(group)
    except Exception as error:
        # a backend may raise anything for what it cannot do; other errors go on to the caller
        if (reason := lacking(error)) is None:
            raise
        return skipped(step, reason)
    wrong = compare(got, step.collective.expect(call), call)
    if wrong is None and not step.collective.in_place:
        wrong = _changed(mine, call)
    return replace(skipped(step, None), wrong=wrong)


def skipped(step: ExchangeStep, reason: str | None) -> Exchange:
    """The record of a step; ``reason``: why it was left out."""
    return Exchange(op=step.op, dtype=step.dtype, elements=step.elements, skipped=reason)


def lacking(error: Exception) -> str | None:
    """Why a backend cannot do something at all; None for an error in doing it.

    >>> lacking(RuntimeError("Cannot use ReduceOp.AVG with Gloo"))
    'Cannot use ReduceOp.AVG with Gloo'
    >>> lacking(RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.1]:58043"))
    """
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, NotImplementedError):
        return text or "not implemented"
    if type(error).__name__ in ("DistNetworkError", "DistStoreError") or BROKEN.search(text):
        return None
    return text if NOT_HERE.search(text) else None


def compare(got: Any, want: Want | None, call: CollectiveCall) -> Wrong | None:
    """The first wrong index of a result, with the count over the whole of it; NaN is wrong. ``whose`` is known where a
    single rank sent that part."""
    import torch

    if want is None or got is None or torch.equal(got, want.values):
        return None
    bad = got != want.values
    if call.tolerance:
        exact, near = want.values.double(), got.double()
        bad = ~((near - exact).abs() <= call.tolerance * exact.abs())
    if not bool(bad.any()):
        return None
    index = int(bad.to(torch.uint8).argmax())
    return Wrong(
        index=index,
        got=value if math.isfinite(value := float(got[index])) else None,
        want=float(want.values[index]),
        count=int(bad.sum()),
        whose=_senders(bad, want),
    )


def _senders(bad: Any, want: Want) -> tuple[int, ...]:
    """The ranks whose part of the result is wrong."""
    found, start = [], 0
    for rank, length in want.senders:
        if bool(bad[start : start + length].any()):
            found.append(rank)
        start += length
    return tuple(sorted(set(found)))


def _changed(mine: Any, call: CollectiveCall) -> Wrong | None:
    """What a collective wrote into an input that it must only read."""
    return compare(mine, Want(values=call.mine(len(mine)), senders=((call.group.rank, len(mine)),)), call)
