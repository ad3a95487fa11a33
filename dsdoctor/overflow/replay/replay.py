"""Runs a step's micro-batches again without disturbing the training.

Forward under the same generators, autocast and training flag; backward that stops short of ``.grad`` and of reduction.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.measure.tensor_paths import leaves
from dsdoctor.overflow.replay.recorder import BatchRecorder, MicroBatch, versions
from dsdoctor.overflow.replay.rerun import (
    eager,
    external_parameters,
    finish_gathering,
    gathers_weights,
    plain_checkpointing,
    settle,
)
from dsdoctor.overflow.replay.restore import undisturbed

Around = Callable[[int], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """How the replay of one micro-batch went. ``micro_batch`` is its number in the step, from 0.

    ``forward`` and ``backward`` say what ran to its end; ``why_not`` what kept it from that. ``changed_inputs`` are the
    numbers of input tensors that were written to since the live forward: what was seen may differ from what was.
    """

    micro_batch: int
    forward: bool
    backward: bool
    why_not: str | None = None
    changed_inputs: tuple[int, ...] = ()


def replay(
    recorder: BatchRecorder,
    *,
    around: Around,
    which: Sequence[int] | None = None,
    backward: bool = True,
    factor: float = 1.0,
) -> tuple[Replayed, ...]:
    """Run the recorded micro-batches again, on all ranks together: those numbered in ``which``, by default those that a
    backward followed, or all when none was.

    ``around(number)`` is entered before the forward of that micro-batch and left after its backward: a place for hooks.
    Parameters' and activations' tensor hooks see this rank's own gradients, not yet reduced, multiplied by ``factor`` and,
    as live, by the loss scale over the accumulation steps. Exceptions inside come back as ``why_not``.
    One small all_reduce precedes the first micro-batch, so that all ranks run the same things.
    """
    engine = recorder.engine
    wanted = _with_backward(recorder.batches) if which is None else which
    plan = _agree(engine, recorder.batches, wanted, backward=backward)
    recorder.replaying = True
    done = []
    try:
        with undisturbed(engine), eager(), plain_checkpointing():
            for number, (forward, back) in zip(wanted, plan, strict=False):
                done.append(
                    _again(recorder, number, around, forward=forward, backward=back and backward, factor=factor)
                )
    finally:
        recorder.replaying = False
        recorder.outputs = None
    return tuple(done)


def _with_backward(batches: list[MicroBatch]) -> Sequence[int]:
    """A forward that nothing went back through, of a validation say, is not part of the step."""
    followed = [number for number, batch in enumerate(batches) if batch.gradients or batch.dropped]
    return followed or range(len(batches))


def _agree(engine: Any, batches: list[MicroBatch], wanted: Sequence[int], *, backward: bool) -> list[tuple[bool, bool]]:
    """What every rank can do, per wanted micro-batch: one MIN over the world. A rank with fewer micro-batches shortens it."""
    mine = [len(wanted)]
    can = []
    for number in wanted:
        batch = batches[number]
        kept = batch.args is not None
        can += [int(kept), int(kept and backward and bool(batch.gradients))]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        shortest = torch.tensor(mine, device=engine.device)
        torch.distributed.all_reduce(shortest, op=torch.distributed.ReduceOp.MIN)
        agreed = torch.tensor(can[: 2 * int(shortest)], dtype=torch.int64, device=engine.device)
        if agreed.numel():
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
        can = agreed.tolist()
    return [(bool(forward), bool(back)) for forward, back in zip(can[::2], can[1::2], strict=True)]


def _again(
    recorder: BatchRecorder, number: int, around: Around, *, forward: bool, backward: bool, factor: float
) -> Replayed:
    engine, batch = recorder.engine, recorder.batches[number]
    if not forward or batch.args is None:
        return Replayed(micro_batch=number, forward=False, backward=False, why_not="its inputs were not kept (limit)")
    changed = _changed(batch)
    went_back = False
    with contextlib.ExitStack() as stack:

        def run_forward() -> None:
            stack.enter_context(around(number))
            _forward(engine, batch)

        why_not = _attempt(run_forward, engine, batch.gathers)
        went = why_not is None
        starts, lost = _starts(batch, recorder.outputs or [])
        recorder.outputs = None
        if backward and _all_ranks(engine, went and lost is None):
            why_not = _attempt(partial(_backward, engine, starts, factor), engine, None)
            went_back = why_not is None
        elif went:
            why_not = (lost or "another rank could not go on") if backward else _why_no_backward(batch)
    settle(engine)
    return Replayed(micro_batch=number, forward=went, backward=went_back, why_not=why_not, changed_inputs=changed)


def _attempt(act: Callable[[], None], engine: Any, gathers: int | None) -> str | None:
    """Call ``act`` and return why it failed, or None. Raises the error only where the other ranks would hang without it."""
    try:
        act()
    except Exception as error:
        # a replay that fails must not end the training. But if the other ranks wait for this one to gather weights, and it
        # cannot take part, the job would hang: then it is better that it ends
        if not finish_gathering(engine, gathers):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _all_ranks(engine: Any, well: bool) -> bool:
    """Under ZeRO-3 a backward gathers weights: all ranks or none. Elsewhere each for itself."""
    if not gathers_weights(engine) or not torch.distributed.is_initialized():
        return well
    flag = torch.tensor([int(well)], device=engine.device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)


def _forward(engine: Any, batch: MicroBatch) -> None:
    module = engine.module
    if module.training is not batch.training:
        module.train(batch.training)
    if batch.micro_offset is not None:
        module.micro_offset = batch.micro_offset
    batch.random.restore()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind, enabled, kind_dtype in batch.autocast:
            if enabled or torch.is_autocast_enabled(kind):
                again = torch.autocast(kind, dtype=kind_dtype, enabled=enabled, cache_enabled=batch.caching)
                stack.enter_context(again)
        with external_parameters(engine):
            module(*_fresh(batch.args), **_fresh(batch.kwargs))


def _backward(engine: Any, starts: list[tuple[Tensor, Tensor]], factor: float) -> None:
    """Compute the gradients of all parameters for their hooks to see; none is stored."""
    parameters = [each for each in engine.module.parameters() if each.requires_grad]
    # these hooks run after the caller's and replace each gradient by an empty one, so that never all of them are in memory
    handles = [parameter.register_hook(_hollow) for parameter in parameters]
    outputs = [output for output, _ in starts]
    gradients = [_scaled(gradient, factor) for _, gradient in starts]
    try:
        with torch.enable_grad():
            torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    """A gradient to begin with, times a factor. Where the loss scale was beyond the format of the loss, what is left is 1."""
    if factor == 1.0:
        return gradient
    if factor < 1.0 and gradient.numel() == 1 and bool(torch.isinf(gradient)):
        return torch.ones_like(gradient)
    return gradient * factor


def _starts(batch: MicroBatch, outputs: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], str | None]:
    """Outputs where the live backward began, with the gradients it began with; and why it cannot begin there again.

    An output that another one was computed from (logits beside a loss) got its gradient from there, and gets it again.
    """
    if batch.starts is None:
        batch.starts = _begins(batch, outputs)
    # once known they are kept: a module that is tried in float32 gives casts of its outputs, which nothing is computed from
    first = [number for number in batch.starts if number < len(outputs)]
    for number in first:
        if number in batch.dropped:
            return [], f"the gradient of output {number} ({batch.dropped[number] >> 20} MiB) was not kept (limit)"
    starts = [(outputs[number], batch.gradients[number]) for number in first if outputs[number].requires_grad]
    return starts, None if starts else "no gradient reached its outputs"


def _begins(batch: MicroBatch, outputs: list[Tensor]) -> tuple[int, ...]:
    """The outputs that a gradient reached and that no other such output was computed from."""
    reached = {number for number in (*batch.gradients, *batch.dropped) if number < len(outputs)}
    nodes = {number: outputs[number].grad_fn for number in sorted(reached)}
    below = [_below(node) for node in nodes.values()] if len(nodes) > 1 else []
    return tuple(number for number, node in nodes.items() if not any(node in each for each in below))


def _below(node: Any) -> set[Any]:
    seen: set[Any] = set()
    waiting = [node]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return seen


def _why_no_backward(batch: MicroBatch) -> str | None:
    if batch.gradients:
        return None
    return "its outputs' gradients were not kept (limit)" if batch.dropped else "no gradient reached its outputs"


def _hollow(gradient: Tensor) -> Tensor:
    return gradient.new_zeros(()).expand(gradient.shape)


def _fresh(value: Any) -> Any:
    """The same inputs as leaves of a new graph: the live one is gone."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_fresh(item) for item in value)
    if type(value) is dict:
        return {key: _fresh(item) for key, item in value.items()}
    return value


def _changed(batch: MicroBatch) -> tuple[int, ...]:
    now = versions(leaves((batch.args, batch.kwargs)))
    if len(now) != len(batch.versions):
        return tuple(range(len(now)))
    return tuple(number for number, pair in enumerate(zip(now, batch.versions, strict=True)) if pair[0] != pair[1])
