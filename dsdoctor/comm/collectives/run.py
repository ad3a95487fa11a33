"""One step of a test on the ranks of torch.distributed's default group -> this rank's result, compared with the expected one.

Every rank does the same steps. Whose data is wrong: see ``blame``.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from dsdoctor.comm.collectives import calls
from dsdoctor.comm.collectives.calls import (
    DTYPES,
    ODD,
    Buffer,
    Collective,
    CollectiveCall,
    ExchangeStep,
    Reduction,
    Want,
    all_gather,
    inverse_sets,
    of_all,
    wait_for_device,
)
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange, Wrong
from dsdoctor.core.text import decode


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


# Finds the ranks whose contribution to a result was wrong: repeats the wrong step with inputs that distinguish the ranks.
#
# Every rank of the group calls ``follow_up`` for the same step, also a rank that saw nothing wrong.


MAX_PLACES = 4
"""Wrong places of a result that are examined: each may have another cause."""

MAX_GATHERED = 1 << 22
"""Elements that are gathered to see whose arrive wrong."""

MAX_COMPARED = 1000
"""Errors of one repeat that are compared with those of the others."""

Errors = dict[int, float]
"""Place in the result -> how far from right it is; nothing where it is right."""


def follow_up(group: RankGroup, step: ExchangeStep, first: Exchange) -> Exchange:
    """Do a wrong step again. ``whose`` of the answer is empty where the error did not come again or the data does not show it.

    A collective that only moves data shows the sender by itself. For a reduction two things are tried:

    - The same inputs are gathered: a rank whose part arrives wrong is named.
    - The reduction is repeated with some ranks' inputs inverted: those with a binary digit of their number set, then the others,
      digit after digit. The error changes exactly when the faulty rank is among the inverted ones, which gives its number
      digit by digit. An error that changes with both halves, or with neither, is not one rank's contribution: none is named.
    """
    if step.collective.reduction is None:
        repeated = exchange(group, step)
        again = repeated.wrong is not None
        whose = {rank for seen in (first, repeated) if seen.wrong for rank in seen.wrong.whose}
    else:
        errors = _errors(group, step)
        gathered = _gathered(group, step)
        spelt = _spelt(group, step, errors)
        again = bool(errors or gathered)
        whose = spelt or gathered or set(first.wrong.whose if first.wrong else ())
    if first.wrong is None:
        return first
    return replace(first, wrong=replace(first.wrong, whose=tuple(sorted(whose)), again=again))


def _errors(group: RankGroup, step: ExchangeStep, inverted: frozenset[int] = frozenset()) -> Errors:
    """The errors of the result when some ranks send the inverse of their values."""
    call = step.call(group, inverted)
    got, want = step.collective.run(call, call.mine(step.collective.length(call))), step.collective.expect(call)
    if got is None or want is None or compare(got, want, call) is None:
        return {}
    if call.dtype != "int64":
        got, want = got.double(), replace(want, values=want.values.double())
    places = (got != want.values).nonzero().flatten().tolist()
    return {place: (got[place] - want.values[place]).item() for place in places[:MAX_COMPARED]}


def _gathered(group: RankGroup, step: ExchangeStep) -> set[int]:
    """The ranks whose input arrives wrong when it is only moved."""
    call = step.call(group)
    call = replace(call, elements=max(min(step.collective.length(call), MAX_GATHERED // group.world), 1))
    wrong = compare(all_gather(call, call.mine(call.elements)), of_all(call), call)
    return set(wrong.whose) if wrong else set()


def _spelt(group: RankGroup, step: ExchangeStep, errors: Errors) -> set[int]:
    """The ranks whose inversion changes the errors; every rank repeats all, whatever it saw itself."""
    places = sorted(errors)[:MAX_PLACES]
    numbers: dict[int, int | None] = dict.fromkeys(places, 0)
    for digit, (ones, zeros) in enumerate(inverse_sets(group.world)):
        with_ones, with_zeros = _errors(group, step, ones), _errors(group, step, zeros)
        for place in places:
            digit_set = _changed_input(errors[place], with_ones.get(place, 0))
            digit_unset = _changed_input(errors[place], with_zeros.get(place, 0))
            number = numbers[place]
            numbers[place] = None if number is None or digit_set == digit_unset else number | digit_set << digit
    return {number for number in numbers.values() if number is not None and number < group.world}


def _changed_input(before: float, after: float) -> bool:
    """Whether an error is another one: a wrong bit of an inverted number errs to the other side, give or take a rounding."""
    return abs(after - before) > abs(before) / 2


# Runs the steps of a test, one after the other on every rank: steps -> what came out on this rank.


FOLLOWED = 6
"""Wrong steps that are examined further."""
LONG = timedelta(hours=1)
"""How long a rank waits for the others at the store; the process that started it ends it before that."""


def run_steps(
    group: RankGroup, steps: Sequence[ExchangeStep], progress: Progress, budget: float | None = None
) -> tuple[Exchange, ...]:
    """Exchange and compare; if anything was wrong on any rank, find out with all ranks whose data it was.

    ``progress`` hears of each before it begins. With ``budget``, rank 0 decides by its clock whether there is time for
    the next large step; those left out are skipped with that reason. Raises what torch raises where communication breaks.
    """

    notes, until = _Notes(group), time.monotonic() + (budget or 0)
    seen: list[Exchange] = []
    for number, step in enumerate(steps, 1):
        if budget is not None and step.large and not notes.go(number, time.monotonic() < until):
            seen.append(skipped(step, f"the {budget:g} s for the exchanges were used up"))
            continue
        progress.tell(number, str(step))
        seen.append(exchange(group, step))
        if reason := seen[-1].skipped:
            progress.skip(number, reason)
    wrong = [number for number, exchanged in enumerate(seen) if exchanged.wrong is not None]
    for turn, number in enumerate(notes.all_wrong(wrong, steps), len(steps) + 1):
        progress.tell(turn, f"{steps[number]}, again, to see whose data is wrong")
        seen[number] = follow_up(group, steps[number], seen[number])
    return tuple(seen)


class _Notes:
    """Notes between ranks through the group's store, which works also where the collectives do not."""

    def __init__(self, group: RankGroup) -> None:
        from torch.distributed import distributed_c10d

        self._group, self._store = group, distributed_c10d._get_default_store()
        turn = self._store.add(f"dsdoctor/turns/{group.rank}", 1)
        self._key = f"dsdoctor/exchanges/{turn}"

    def go(self, number: int, yes: bool) -> bool:
        """Rank 0's answer on every rank."""
        key = f"{self._key}/go/{number}"
        if self._group.rank == 0:
            self._store.set(key, "1" if yes else "0")
            return yes
        return self._wait(key) == b"1"

    def all_wrong(self, mine: Sequence[int], steps: Sequence[ExchangeStep]) -> tuple[int, ...]:
        """The first wrong step of each collective on any rank, the same on every rank; waits until all ranks have written
        theirs.

        Only a rank with something wrong writes a list, and the last rank to come joins the lists: a few messages a rank.
        """
        if mine:
            place = self._store.add(f"{self._key}/lists", 1)
            self._store.set(f"{self._key}/list/{place}", msgspec.json.encode(_firsts(mine, steps)).decode())
        if self._store.add(f"{self._key}/done", 1) == self._group.world:
            lists = range(1, self._store.add(f"{self._key}/lists", 0) + 1)
            told = [decode(self._wait(f"{self._key}/list/{place}"), list[int]) for place in lists]
            wrong = sorted({number for numbers in told for number in numbers})
            self._store.set(f"{self._key}/wrong", msgspec.json.encode(_firsts(wrong, steps)[:FOLLOWED]).decode())
        return tuple(decode(self._wait(f"{self._key}/wrong"), list[int]))

    def _wait(self, key: str) -> bytes:
        self._store.wait([key], LONG)
        return bytes(self._store.get(key))


def _firsts(numbers: Sequence[int], steps: Sequence[ExchangeStep]) -> list[int]:
    """The first of these steps for each collective."""
    first: dict[str, int] = {}
    for number in numbers:
        first.setdefault(steps[number].collective.name, number)
    return sorted(first.values())


# The collectives that ZeRO uses, through deepspeed.comm, with values. Compiles nothing.
#
# On a CPU DeepSpeed compiles deepspeed_shm_comm at its start, which takes minutes, and a process that is killed meanwhile leaves a
# lock behind for which every later start waits for ever. Only `inference_all_reduce` uses that op, so it is left out here.


COMPILED_AT_START = "deepspeed_shm_comm"


def run_layer(group: RankGroup, progress: Progress) -> tuple[Exchange, ...]:
    """Start DeepSpeed's layer on the group that is there, then all_reduce, all_gather and reduce_scatter through it, with values.

    Importing deepspeed prints. Raises what it raises.
    """
    progress.tell(0, "importing deepspeed")
    import deepspeed

    # deepspeed/comm/torch.py, build_shm_op: an op that is not compatible is neither compiled nor loaded
    deepspeed.ops.__compatible_ops__[COMPILED_AT_START] = False

    progress.tell(0, "deepspeed.init_distributed")
    deepspeed.init_distributed(dist_backend=group.backend, auto_mpi_discovery=False, verbose=False)
    found = [collective for collective in LAYER if group.world >= collective.least]
    elements = max(ODD // group.world, 1) | 1
    return run_steps(
        group,
        [ExchangeStep(collective=collective, dtype=kind, elements=elements) for collective in found for kind in DTYPES],
        progress,
    )


def _layer() -> Any:
    import deepspeed.comm

    return deepspeed.comm


def _all_reduce(call: CollectiveCall, mine: Buffer) -> Buffer:
    _layer().all_reduce(mine, op=calls.operator(call))
    return mine


def _all_gather(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements * call.group.world)
    _layer().allgather_fn(result, mine)
    return result


def _reduce_scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements)
    _layer().reduce_scatter_fn(result, mine, op=calls.operator(call))
    return result


LAYER = (
    Collective(
        name="deepspeed all_reduce",
        run=_all_reduce,
        expect=calls.reduced,
        reduction=Reduction.SUM,
        in_place=True,
    ),
    Collective(name="deepspeed all_gather", run=_all_gather, expect=calls.of_all),
    Collective(
        name="deepspeed reduce_scatter",
        run=_reduce_scatter,
        expect=calls.my_part_reduced,
        length=calls.chunks,
        reduction=Reduction.SUM,
    ),
)
