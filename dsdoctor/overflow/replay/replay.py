"""Keeps what it takes to run a step's micro-batches again, and runs them without disturbing the training.

Kept are references, generator states and outputs' gradients: no copy of a tensor, no kernel, no wait for a device; some thirty
calls of Python per micro-batch. Forward under the same generators, autocast and training flag; backward that stops short of
``.grad`` and of reduction.
"""

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsdoctor.core.cgroups import free_memory
from dsdoctor.core.host import LocalHost
from dsdoctor.overflow.hooks.engine import is_pipeline
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hook, Hooks
from dsdoctor.overflow.measure.readings import leaves
from dsdoctor.overflow.replay.restore import (
    Randomness,
    device_random,
    eager,
    external_parameters,
    finish_gathering,
    gathers_so_far,
    gathers_weights,
    muted,
    plain_checkpointing,
    release_gathered,
    undisturbed,
)
from dsdoctor.rules import book

MAX_INPUT_BYTES = 1 << 30
"""Of inputs that a step may keep alive. Token batches are kilobytes; a pipeline stage's inputs are activations."""
SMALL_INPUT_BYTES = 32 << 20
"""Of inputs, below which nobody's memory runs out for them: it is not asked for."""
MIN_FREE_FACTOR = 50
"""Above that a step keeps no more than this part of the memory that is free: what the script drops it means to be free."""
MAX_GRADIENT_BYTES = 64 << 20
"""Of outputs' gradients that a step may keep alive. A loss' gradient has 4; that of logits may have gigabytes."""
MAX_WAITING_FORWARDS = 64
"""Forwards kept that no backward has followed yet: a validation loop without ``no_grad`` must not fill the memory."""
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


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One live forward of the engine's module under grad mode. ``args`` and ``kwargs`` are the caller's own objects;
    ``None`` when they exceeded the limit. ``gradients`` and ``dropped`` are keyed by the output tensor's
    number; ``starts``: those of them with which the backward begins, known from the first replay on."""

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    random: Randomness
    training: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caching: bool
    micro_offset: int | None
    gathers: int | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    starts: tuple[int, ...] | None = None


class HostMemory:
    """What this machine has free, asked for at most once in ``again`` seconds: it takes milliseconds, and many a forward asks."""

    def __init__(self, again: float = 1.0) -> None:
        self._again = again
        self._asked, self._bytes = -math.inf, 0

    def free(self) -> int:
        """In bytes; 0 where that is not known."""
        now = time.monotonic()
        if now - self._asked >= self._again:
            self._asked, self._bytes = now, free_memory(LocalHost()) or 0
        return self._bytes


def _free_on(device: torch.device, host: HostMemory) -> int:
    """Bytes that are free on a device, torch's own cache counted as such; 0 where that is not known."""
    if device.type == "cpu":
        return host.free()
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


class BatchRecorder:
    """Keeps the micro-batches since the last ``forget``, from hooks on the engine and its module."""

    def __init__(
        self, engine: Any, *, input_limit: int = MAX_INPUT_BYTES, gradient_limit: int = MAX_GRADIENT_BYTES
    ) -> None:
        self.engine = engine
        self.batches: list[MicroBatch] = []
        self.outputs: list[Tensor] | None = None
        self._waiting: dict[int, MicroBatch] = {}
        self.replaying = False
        self._input_limit, self._gradient_limit = input_limit, gradient_limit
        self._input_bytes = self._gradient_bytes = 0
        self._host = HostMemory()
        self._pipeline = is_pipeline(engine)
        self._gathers = gathers_weights(engine)
        self._device = device_random(engine.device)
        self._devices = tuple(dict.fromkeys(("cpu", engine.device.type)))
        self._module = module = engine.module
        self._handles = [
            module.register_forward_pre_hook(Hook(self._before_module), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(self._after_module)),
            engine.register_forward_pre_hook(Hook(self._before_engine), prepend=True, with_kwargs=True),
            engine.register_forward_hook(Hook(self._after_engine)),
        ]

    def forget(self) -> None:
        """Drop everything that is kept. To be called at every step boundary."""
        self.batches = []
        self._waiting = {}
        self._input_bytes = self._gradient_bytes = 0

    def detach(self) -> None:
        """Take the hooks away and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def _before_module(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # under torch.compile the engine's hooks stand in: these would be traced
        if not torch.compiler.is_compiling() and self._module._compiled_call_impl is None:
            self._before(args, kwargs)

    def _after_module(self, _: Any, __: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and (self.replaying or self._module._compiled_call_impl is None):
            self._after(output)

    def _before_engine(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._module._compiled_call_impl is not None:
            self._before(args, kwargs)

    def _after_engine(self, _: Any, __: Any, output: Any) -> None:
        if self._module._compiled_call_impl is not None:
            self._after(output)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.replaying or not torch.is_grad_enabled():
            return
        inputs = leaves((args, kwargs))
        size = sum([tensor.nbytes for tensor in inputs])
        fits = self._fits(self._input_bytes + size, inputs)
        self._input_bytes += size if fits else 0
        module = self._module
        batch = MicroBatch(
            args=args if fits else None,
            kwargs=kwargs if fits else {},
            versions=versions(inputs),
            random=Randomness(self._device),
            training=module.training,
            autocast=tuple(
                [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._devices]
            ),
            caching=torch.is_autocast_cache_enabled(),
            micro_offset=module.__dict__.get("micro_offset"),
        )
        self.batches.append(batch)
        self._waiting[id(batch)] = batch
        if len(self._waiting) > MAX_WAITING_FORWARDS:
            self._give_up(next(iter(self._waiting.values())))

    def _fits(self, size: int, inputs: Sequence[Tensor]) -> bool:
        """Whether a step may keep inputs of so many bytes, the last of them these."""
        if size > self._input_limit or size <= SMALL_INPUT_BYTES:
            return size <= SMALL_INPUT_BYTES and size <= self._input_limit
        return all(
            size * MIN_FREE_FACTOR <= _free_on(device, self._host) for device in {tensor.device for tensor in inputs}
        )

    def _give_up(self, batch: MicroBatch) -> None:
        del self._waiting[id(batch)]
        self.batches.remove(batch)
        self._input_bytes -= sum(tensor.nbytes for tensor in leaves((batch.args, batch.kwargs)))

    def _after(self, output: Any) -> None:
        if self.replaying:
            self.outputs = leaves(output)
            return
        if not torch.is_grad_enabled() or not self.batches:
            return
        if self._gathers:
            self.batches[-1].gathers = gathers_so_far(self.engine)
        for number, tensor in enumerate(leaves(output)):
            node = tensor.grad_fn
            if node is not None:
                # on the node, not on the tensor: after whatever hooks DeepSpeed puts on the tensor to scale gradients
                node.register_prehook(Hook(self._keeper(self.batches[-1], number, tensor.output_nr)))

    def _keeper(self, batch: MicroBatch, number: int, position: int) -> Callable[[tuple[Any, ...]], None]:
        # a graph is not looked through for garbage: what its nodes hold lives as long as it does, and that must be no engine
        held = weakref.ref(self)

        def keep(arrived: tuple[Any, ...]) -> None:
            if (recorder := held()) is not None and not recorder.replaying and arrived[position] is not None:
                recorder._begins(batch, number, arrived[position])

        return keep

    def _begins(self, batch: MicroBatch, number: int, gradient: Tensor) -> None:
        """The backward of a micro-batch begins with this gradient of one of its outputs."""
        if number in batch.gradients:
            return
        self._waiting.pop(id(batch), None)
        self._gradient_bytes += gradient.nbytes
        if self._gradient_bytes > self._gradient_limit:
            self._gradient_bytes -= gradient.nbytes
            batch.dropped[number] = gradient.nbytes
        else:
            # a pipeline receives every micro-batch's gradient into the same buffer
            batch.gradients[number] = gradient.clone() if self._pipeline else gradient


def versions(inputs: list[Tensor]) -> tuple[int, ...]:
    """How often each tensor was written in place so far."""
    # as ``version_of``, of which each call is paid in every step
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in inputs])


def began(batch: MicroBatch, judge: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``judge`` finds an element in the gradients with which a micro-batch's backward began, as far as they are kept. Known
    from the first replay on."""
    first = (gradient for number, gradient in batch.gradients.items() if number in (batch.starts or ()))
    return any(bool(judge(gradient).any()) for gradient in first)


def is_not_finite(gradient: Tensor) -> Tensor:
    """Which elements are nan or inf."""
    return ~torch.isfinite(gradient)


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
    engine, batches = recorder.engine, recorder.batches
    # a forward that nothing went back through, of a validation say, is not part of the step
    followed = [number for number, batch in enumerate(batches) if batch.gradients or batch.dropped]
    wanted = which if which is not None else followed or range(len(batches))
    plan = _agree(engine, batches, wanted, backward=backward)
    recorder.replaying = True
    done = []
    try:
        with undisturbed(engine), muted(), eager(), plain_checkpointing():
            for number, (forward, back) in zip(wanted, plan, strict=False):
                done.append(
                    _again(recorder, number, around, forward=forward, backward=back and backward, factor=factor)
                )
    finally:
        recorder.replaying = False
        recorder.outputs = None
    return tuple(done)


@contextlib.contextmanager
def recorded(engine: Any, take: Callable[[BatchRecord], None], **options: Any) -> Iterator[None]:
    """Around one micro-batch of a replay: each call of the model is recorded, and given to ``take`` with its figures. ``options``:
    those of ``Hooks``."""
    records: list[BatchRecord] = []
    hooks = Hooks(engine.module, on_record=records.append, **options)
    try:
        yield
    finally:
        hooks.detach()
        if engine.device.type == "cuda":
            # ZeRO-3 gathers in a stream of its own, where the readings of that were queued too
            torch.cuda.synchronize(engine.device)
        for record in records:
            record.settle()
            take(record)


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
        dropped = book.phrase("overflow", "inputs-dropped")
        return Replayed(micro_batch=number, forward=False, backward=False, why_not=dropped)
    changed = _changed_inputs(batch)
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
        elif went and backward:
            why_not = lost or book.phrase("overflow", "other-rank-stopped")
        elif went and not batch.gradients:
            why_not = book.phrase("overflow", "gradients-dropped" if batch.dropped else "no-gradient")
    release_gathered(engine)
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


def _all_ranks(engine: Any, able: bool) -> bool:
    """Whether all ranks are able, under ZeRO-3, where a backward gathers weights: all ranks or none. Elsewhere each for itself."""
    if not gathers_weights(engine) or not torch.distributed.is_initialized():
        return able
    flag = torch.tensor([int(able)], device=engine.device)
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
    handles = [parameter.register_hook(_without_values) for parameter in parameters]
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
            return [], book.phrase("overflow", "gradient-dropped", output=number, size=batch.dropped[number] >> 20)
    starts = [(outputs[number], batch.gradients[number]) for number in first if outputs[number].requires_grad]
    return starts, None if starts else book.phrase("overflow", "no-gradient")


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


def _without_values(gradient: Tensor) -> Tensor:
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


def _changed_inputs(batch: MicroBatch) -> tuple[int, ...]:
    """The inputs that were written to since the live forward."""
    now = versions(leaves((batch.args, batch.kwargs)))
    if len(now) != len(batch.versions):
        return tuple(range(len(now)))
    return tuple(number for number, pair in enumerate(zip(now, batch.versions, strict=True)) if pair[0] != pair[1])
