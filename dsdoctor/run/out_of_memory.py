"""A rank that ran out of memory -> the lines that say where, what refused it, what grew, who holds what, and what to change."""

import linecache
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from dsdoctor.core.host import LocalHost
from dsdoctor.memory.calls import Call, Grown, Growth, LastCall
from dsdoctor.memory.failure import Kept, asked_bytes, kept_graphs, limit_lines, look_limits
from dsdoctor.memory.ledger import amount
from dsdoctor.memory.models import ZeroSettings
from dsdoctor.ranks.failure import Failure

OF_HOST = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "Unable to allocate")
"""What torch and numpy say of the host's memory; a device's allocators say otherwise."""
WORTH = 4
"""A change is advised where it wins at least this part of the one allocation that failed."""
MUCH = 0.1
"""Of what is held where memory grew: from this share on a container of tensors is told, though it keeps no graph."""
LARGER = 1.5
"""So many times larger than any call before: then that is told."""


def failure_lines(
    failure: Failure, trace: TracebackType | None, engine: Any, last: LastCall | None, growth: Growth | None
) -> Iterator[str]:
    """All that is known of a failure for want of memory. ``engine``: None where the process has none."""
    no_engine = "" if engine is not None else ", in a process that has no DeepSpeed engine"
    yield f"this rank ran out of memory at {users_line(failure)}{no_engine}"
    said = first_line(failure)
    yield f"    the exception: {said}"
    if of_host(failure):
        yield from (f"    {line}" for line in limit_lines(said, look_limits(LocalHost())))
    grown = growth.grown() if growth is not None else None
    if grown:
        yield from growth_lines(grown)
        # what does not grow with the calls did not make memory grow with them
        fewest = (grown.last_call - grown.first_call) / 2
        yield from kept_lines(kept_graphs(trace, fewest=fewest, least=MUCH * grown.last))
    if engine is not None and last is not None:
        yield from larger_call(last)
        yield from engine_lines(engine, said, last.call, grows=bool(grown))


def users_line(failure: Failure) -> str:
    """The innermost line of the user's own."""
    at = failure.place
    return "" if at is None else f"{at.file}:{at.line} {linecache.getline(at.file, at.line).strip()}".rstrip()


def of_host(failure: Failure) -> bool:
    """Whether it was surely the host's memory that was asked for, and not a device's."""
    return any(cause.refuses_memory or any(saying in cause.message for saying in OF_HOST) for cause in failure.causes)


def first_line(failure: Failure) -> str:
    """What the first exception says that speaks of an amount, else the failure itself."""
    told = next((cause for cause in failure.causes if asked_bytes(cause.message) is not None), failure.causes[0])
    text = told.message.strip()
    return text.splitlines()[0][:300] if text else failure.causes[0].kinds[0]


def growth_lines(grown: Grown) -> Iterator[str]:
    """That memory grew with every call, and by how much."""
    yield (
        f"    it kept growing: {amount(grown.first)} at call {grown.first_call} of the engine, {amount(grown.last)} at call "
        f"{grown.last_call}: {amount(int(grown.each))} a call"
    )
    yield "        the batch size is not the cause: something keeps each step's tensors"


def kept_lines(kept: tuple[Kept, ...]) -> Iterator[str]:
    """Where memory grew: what keeps autograd graphs, which keep the activations of their steps, and what keeps many bytes."""
    for each in kept[:3]:
        where = f"    {each.name} in {each.place}"
        if each.is_sum:
            yield f"{where} is a sum of {each.count + 1} tensors with their autograd graphs: they keep what each step saved"
        elif each.count:
            yield f"{where} has {each.count} tensors with their autograd graphs: each graph keeps what its step saved for backward"
        else:
            yield f"{where} has tensors of {amount(each.size)}"
    graphs = next((each for each in kept if each.count), None)
    if graphs:
        yield f"        Fix: keep numbers in {graphs.name}: loss.item(), or tensor.detach() if you need the tensor"
    elif not kept:
        yield "        none of the script's lists, attributes or sums has such tensors: the growth is elsewhere, or not in tensors"


def larger_call(last: LastCall) -> Iterator[str]:
    """That the call which failed was larger than all before it."""
    now, before = last.call, last.largest_before
    if now is not None and before is not None and last.count > 2 and now.size > LARGER * before.size:
        yield f"    the engine's last call was of {now}; the largest of the {last.count - 1} before it of {before}"


def engine_lines(engine: Any, said: str, call: Call | None, *, grows: bool) -> Iterator[str]:
    """Predicted against measured, and what to change. ``said``: the exception. ``call``: the engine's last, None for none."""
    from dsdoctor.memory.engine import REST, holders, layout_of, settings_of, shape_of
    from dsdoctor.memory.predict import Situation

    now = Situation(settings=settings_of(engine), model=shape_of(engine.module), run=None, layout=layout_of(engine))
    held = holders(engine)
    yield from device_lines(engine)
    yield f"    measured now: {amount(held.total)} in live tensors that Python's objects hold"
    yield from (f"        {what}: {amount(size)}" for what, size in held.sizes)
    for what, size in held.largest:
        if size * 50 > held.total:
            yield f"            {what}: {amount(size)}"
    now, why = with_activations(engine, now, call)
    yield from predicted_lines(now, engine, why)
    asked = asked_bytes(said) or 0
    bucket = bucket_line(now.settings, asked, elements=sum(count for _, count, _ in now.model.parameters))
    if bucket:
        yield bucket
    if grows:
        yield "    what to change: release what is kept. A smaller batch or activation checkpointing only delays this"
    elif not bucket:
        yield from advice_lines(engine, now, asked, held.total, dict(held.sizes).get(REST, 0))


def bucket_line(settings: ZeroSettings, asked: int, *, elements: int) -> str:
    """That what was asked for is one of ZeRO's buffers, whose size is a setting; "" where no size fits."""
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        size = getattr(settings, name)
        if asked in {size * 2, size * 4}:
            enough = f": the model has {elements:,} in all" if elements < size else ""
            return (
                f"    what to change: zero_optimization.{name}: the request is its buffer, {size:,} elements of "
                f"{asked // size} bytes{enough}"
            )
    return ""


def advice_lines(engine: Any, now: Any, asked: int, held: int, rest: int) -> Iterator[str]:
    """The changes that win as much as matters beside the one allocation that failed."""
    from dsdoctor.memory.predict import changes

    advice = [f"{c.what}: {amount(c.won)} less; costs: {c.cost}" for c in changes(now) if c.won * WORTH >= asked]
    if now.run is None and rest > held // 3 and rest * WORTH >= asked:
        advice = [*activation_advice(engine, rest), *advice]
    if advice:
        yield "    what to change, cheapest first:"
        yield from (f"    {number}. {line}" for number, line in enumerate(advice[:3], 1))
    elif asked > held:
        yield f"    {amount(asked)} were requested at once, while all tensors are {amount(held)}: check the sizes in that line"


def with_activations(engine: Any, now: Any, call: Any) -> tuple[Any, str]:
    """The situation with the engine's last call followed by its shapes, "" and otherwise why it is not in it."""
    from dataclasses import replace

    from dsdoctor.memory.engine import followed

    if call is None:
        return now, "the engine has not been called with a tensor yet"
    found = followed(engine.module, call, now.settings.dtype, together=now.layout.together)
    if isinstance(found, str):
        return now, found
    model, run = found
    return replace(now, model=model, run=run), ""


def predicted_lines(now: Any, engine: Any, why: str) -> Iterator[str]:
    """What was to be expected: at the peak of each part where the last call could be followed, else of the states alone."""
    from dsdoctor.memory.models import Point

    told, is_first = now.predicted(), not engine.global_steps
    if why:
        point = Point.AFTER_INITIALIZE if is_first else Point.AFTER_STEP
        moment = told.at(point)
        yield f"    predicted without activations: {amount(moment.device)} {point.value.replace('_', ' ')}"
        yield f"        activations are unknown: {why}"
    else:
        first = (Point.FIRST_FORWARD, Point.FIRST_BACKWARD, Point.FIRST_STEP)
        points = first if is_first else (Point.FORWARD, Point.BACKWARD, Point.STEP)
        moment = max((told.at(point) for point in points), key=lambda each: each.device)
        parts = ", ".join(f"{each.value.replace('_', ' ')} {amount(told.at(each).device)}" for each in points)
        yield f"    predicted for {now.run.batch} x {now.run.sequence}, at the peak of: {parts}"
    yield from (f"        {row.what}: {amount(row.size)}" for row in moment.rows[:5] if row.place == "device")


def activation_advice(engine: Any, rest: int) -> Iterator[str]:
    """What makes activations smaller; how much was not computed."""
    if not getattr(engine.module, "is_gradient_checkpointing", False):
        yield f"activation checkpointing, for {amount(rest)} is activations and the like; costs: the forward pass runs twice"
    micro = int(engine.train_micro_batch_size_per_gpu())
    if micro > 1:
        yield f"micro batch {micro // 2}, and twice the gradient_accumulation_steps: about half of that {amount(rest)}"


def device_lines(engine: Any) -> Iterator[str]:
    """What the caching allocator of a GPU says."""
    import torch

    device = torch.device(engine.device)
    if device.type != "cuda":
        return
    stats = torch.cuda.memory_stats(device)
    current, most = stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    free, total = torch.cuda.mem_get_info(device)
    yield f"    the device: {amount(total)}, {amount(free)} free; allocated {amount(current)}, at most {amount(most)}, reserved"
    yield f"        {amount(reserved)}: {amount(reserved - current)} of that is cached by the allocator and unused"
