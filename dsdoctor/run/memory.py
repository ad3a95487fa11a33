"""Memory under `dsdoctor.run`: what an engine held when it ran out (always), and what it holds in each part of a step
(--memory trace). But for the sizes of each call nothing is noted, and nothing heavy imported, before either is wanted."""

import argparse
import functools
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.script import standing_for
from dsdoctor.memory.calls import Growth, LastCall, resident
from dsdoctor.ranks.failure import Failure

STEPS = 3
"""Steps that are traced: the first is unlike the others, and so is the second under ZeRO-3."""
SAYINGS = ("out of memory", "can't allocate memory", "not enough memory: you tried to allocate")
Say = Callable[..., None]


OFF, OOM, TRACE = CHOICES = ("off", "oom", "trace")


def add_option(parser: argparse.ArgumentParser) -> None:
    """--memory."""
    parser.add_argument(
        "--memory",
        metavar="CHOICE",
        default=OOM,
        help="explain a rank that runs out of memory: oom (default), trace (also measure the first steps), or off",
    )


def chosen(value: str) -> str:
    """The choice. Raises UsageError for none."""
    if value not in CHOICES:
        raise UsageError(f"unknown --memory {value!r}; choose one of {', '.join(CHOICES)}", hint="--memory trace")
    return value


class MemoryWatch:
    """The engines of one process, for what is to be said of their memory."""

    def __init__(self, choice: str, say: Say) -> None:
        self.choice, self.say = choice, say
        self.engines: list[tuple[weakref.ref[Any], LastCall, Growth]] = []

    def engine(self, engine: Any) -> None:
        """An engine was made. An error of ours must not end a training."""
        if self.choice == OFF:
            return
        try:
            growth = Growth(reader(engine))
            self.engines.append((weakref.ref(engine), LastCall(engine, growth.note), growth))
            if self.choice == TRACE:
                trace(engine, self.say)
        except Exception as error:
            self.say(f"! memory is not watched; training continues: {type(error).__name__}: {error}")

    def ended(self, failure: Failure, trace: TracebackType | None) -> None:
        """The process ends by this exception, whose traceback is out already and matters more than what we add."""
        if self.choice == OFF or not out_of_memory(failure):
            return
        found = ((each(), last, growth) for each, last, growth in self.engines)
        engine, last, growth = next((three for three in found if three[0] is not None), (None, None, None))
        try:
            from dsdoctor.run.out_of_memory import failure_lines

            self.say(*failure_lines(failure, trace, engine, last, growth))
        except Exception as error:
            self.say(f"! the memory of this rank could not be read: {type(error).__name__}: {error}")


def out_of_memory(failure: Failure) -> bool:
    """Whether an exception, or what caused it, says that there was no memory.

    >>> from dsdoctor.ranks.failure import read_failure
    >>> failures = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), ValueError("size")
    >>> [out_of_memory(read_failure(failure)) for failure in failures]
    [True, False]
    """
    return any(
        cause.refuses_memory or "OutOfMemoryError" in cause.kinds or any(saying in cause.message for saying in SAYINGS)
        for cause in failure.causes
    )


def reader(engine: Any) -> Callable[[], int]:
    """What reads the bytes that grow: those of tensors on a GPU, else what is resident of the process."""
    device = getattr(engine, "device", None)
    if str(device).startswith("cuda"):
        import torch

        return functools.partial(torch.cuda.memory_allocated, device)
    return resident


def trace(engine: Any, say: Say) -> None:
    """Measure the live storages of the first steps, part by part; then everything is as it was."""
    from dsdoctor.memory.engine import LiveStorages, walked

    live = LiveStorages()
    rows: list[tuple[str, dict[str, int]]] = [("after initialize", walked())]
    parts = {"forward": engine.forward, "backward": engine.backward, "step": engine.step}

    def finish() -> None:
        live.stop()
        for name in parts:
            vars(engine).pop(name, None)
        say(*trace_lines(engine, rows))

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
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

        return standing_for(original, measured)

    for name, original in parts.items():
        setattr(engine, name, around(name, original))
    live.start()


def trace_lines(engine: Any, rows: list[tuple[str, dict[str, int]]]) -> Iterator[str]:
    """Each part with its peak, and what was predicted of the states between steps."""
    from dsdoctor.memory.engine import layout_of, settings_of, shape_of
    from dsdoctor.memory.ledger import amount
    from dsdoctor.memory.models import Point
    from dsdoctor.memory.predict import Situation

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
