"""Memory under `dsdoctor.run`: what an engine held when it ran out (always), and what it holds in each part of a step
(--memory trace). But for the sizes of each call nothing is noted, and nothing heavy imported, before either is wanted."""

import argparse
import functools
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dsdoctor.core.errors import UsageError

OFF, OOM, TRACE = CHOICES = ("off", "oom", "trace")
STEPS = 3
"""Steps that are traced: the first is unlike the others, and so is the second under ZeRO-3."""
MIB = 1 << 20
OURS = (f"{os.sep}dsdoctor{os.sep}", f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")
SAYINGS = ("out of memory", "can't allocate memory", "not enough memory: you tried to allocate")

Say = Callable[..., None]


def add_option(parser: argparse.ArgumentParser) -> None:
    """--memory."""
    parser.add_argument(
        "--memory",
        metavar="CHOICE",
        default=OOM,
        help="oom (default) explains a rank that runs out of memory, trace measures the first steps, or off",
    )


def chosen(value: str) -> str:
    """The choice. Raises UsageError for none."""
    if value not in CHOICES:
        raise UsageError(f"--memory is one of {', '.join(CHOICES)}, and not {value!r}", hint="--memory trace")
    return value


class MemoryWatch:
    """The engines of one process, for what is to be said of their memory."""

    def __init__(self, choice: str, say: Say) -> None:
        self.choice, self.say = choice, say
        self.engines: list[weakref.ref[Any]] = []
        self.calls: list[Any] = []

    def engine(self, engine: Any) -> None:
        """An engine was made. An error of ours must not end a training."""
        if self.choice == OFF:
            return
        try:
            from dsdoctor.memory.last_call import LastCall

            self.engines.append(weakref.ref(engine))
            self.calls.append(LastCall(engine))
            if self.choice == TRACE:
                trace(engine, self.say)
        except Exception as error:
            self.say(f"! memory is not watched, and training goes on: {type(error).__name__}: {error}")

    def ended(self, failure: BaseException) -> None:
        """The process ends by this exception, whose traceback is out already and matters more than what we add."""
        if self.choice == OFF or not out_of_memory(failure):
            return
        found = zip(self.engines, self.calls, strict=True)
        engine, last = next(((engine, last) for each, last in found if (engine := each()) is not None), (None, None))
        if engine is None or last is None:
            return
        try:
            self.say(*oom_lines(engine, failure, last.call))
        except Exception as error:
            self.say(f"! what this rank held is not known: {type(error).__name__}: {error}")


def out_of_memory(failure: BaseException) -> bool:
    """Whether an exception, or what caused it, says that there was no memory.

    >>> out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), out_of_memory(ValueError("size"))
    (True, False)
    """
    each: BaseException | None = failure
    while each is not None:
        if type(each).__name__ == "OutOfMemoryError" or any(saying in str(each) for saying in SAYINGS):
            return True
        each = each.__cause__ or each.__context__
    return False


def users_line(failure: BaseException) -> str:
    """The innermost line that is neither Python's nor a package's."""
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in OURS)]
    found = (own or list(frames))[-1:]
    return "; ".join(f"{frame.filename}:{frame.lineno} {frame.line or ''}".rstrip() for frame in found)


def oom_lines(engine: Any, failure: BaseException, call: Any) -> Iterator[str]:
    """Predicted against measured, the line, and what to change. ``call``: the sizes of the engine's last call, None for none."""
    from dsdoctor.memory.changes import Situation, changes
    from dsdoctor.memory.engine import layout_of, settings_of, shape_of
    from dsdoctor.memory.holders import REST, holders

    now = Situation(settings=settings_of(engine), model=shape_of(engine.module), run=None, layout=layout_of(engine))
    held = holders(engine)
    yield f"this rank ran out of memory at {users_line(failure)}"
    yield f"    the exception: {str(failure).strip().splitlines()[0][:300]}"
    yield from device_lines(engine)
    yield f"    measured now: {amount(held.total)} in live tensors"
    yield from (f"        {what}: {amount(size)}" for what, size in held.sizes)
    for what, size in held.largest:
        if size * 50 > held.total:
            yield f"            {what}: {amount(size)}"
    now, why = with_activations(engine, now, call)
    yield from predicted_lines(now, engine, why)
    rest = dict(held.sizes).get(REST, 0)
    advice = [f"{c.what}: {amount(c.won)} less; costs: {c.cost}" for c in changes(now)]
    if now.run is None and rest > held.total // 3:
        advice = [*activation_advice(engine, rest), *advice]
    yield "    what to change, cheapest first:"
    yield from (f"    {number}. {line}" for number, line in enumerate(advice[:3], 1))


def with_activations(engine: Any, now: Any, call: Any) -> tuple[Any, str]:
    """The situation with the engine's last call followed by its shapes, "" and otherwise why it is not in it."""
    from dataclasses import replace

    from dsdoctor.memory.follow_call import followed

    if call is None:
        return now, "the engine was not called with a tensor yet"
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
        yield f"        activations are not told: {why}"
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
    yield f"        {amount(reserved)}: {amount(reserved - current)} of that is held by the allocator and not used"


def amount(size: int) -> str:
    """Bytes as MiB or GiB.

    >>> amount(5 << 30), amount(3 << 20)
    ('5.0 GiB', '3.0 MiB')
    """
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / MIB:.1f} MiB"


def trace(engine: Any, say: Say) -> None:
    """Measure the live storages of the first steps, part by part; then everything is as it was."""
    from dsdoctor.memory.live import LiveStorages, walked

    live = LiveStorages()
    rows: list[tuple[str, dict[str, int]]] = [("after initialize", walked())]
    parts = {"forward": engine.forward, "backward": engine.backward, "step": engine.step}

    def finish() -> None:
        live.stop()
        for name in parts:
            vars(engine).pop(name, None)
        say(*trace_lines(engine, rows))

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            live.mark()
            try:
                return original(*args, **kwargs)
            finally:
                rows.append((f"{name} {engine.global_steps - (name == 'step') + 1}", live.mark()))
                if name == "step":
                    rows.append((f"after step {engine.global_steps}", dict(live.now)))
                if name == "step" and engine.global_steps >= STEPS:
                    finish()

        return measured

    for name, original in parts.items():
        setattr(engine, name, around(name, original))
    live.start()


def trace_lines(engine: Any, rows: list[tuple[str, dict[str, int]]]) -> Iterator[str]:
    """Each part with its peak, and what was predicted of the states between steps."""
    from dsdoctor.memory.changes import Situation
    from dsdoctor.memory.engine import layout_of, settings_of, shape_of
    from dsdoctor.memory.models import Point

    now = Situation(settings=settings_of(engine), model=shape_of(engine.module), run=None, layout=layout_of(engine))
    told = now.predicted()
    predicted = {
        "after initialize": told.at(Point.AFTER_INITIALIZE).device,
        "after step 1": told.at(Point.AFTER_STEP).device,
    }
    yield "memory of the first steps, live tensors at the peak of each part:"
    for name, sizes in rows:
        measured = ", ".join(f"{device} {amount(size)}" for device, size in sizes.items() if device != "meta")
        said = f" (predicted {amount(predicted[name])})" if name in predicted else ""
        yield f"    {name:18} {measured}{said}"
