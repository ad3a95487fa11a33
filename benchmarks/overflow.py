"""What watching costs: ``python benchmarks/overflow.py [--steps 30] [--json FILE] [--device cpu|cuda] [--case 12x64]``.

One process, one model per case; steps alternate between no hooks, Hugging Face's DebugUnderflowOverflow and ours, so that
all meet the same machine. Two figures: seconds inside the hooks per step (CPU: of one thread; robust on a busy machine)
and the wall time of a step. Needs torch, transformers and DeepSpeed; nothing is downloaded.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsdoctor.overflow.measure.measure import backend_of
from dsdoctor.overflow.watch.debug import DebugUnderflowOverflow


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step. ``bars``: percent of a step that frames (with the exact abs min) and guard may cost."""

    name: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    dtype: str
    bars: tuple[float, float]


ON_CPU = (
    Case(name="GPT-2 4x256", layers=4, width=256, vocabulary=2000, batch=4, length=256, dtype="float32", bars=(4, 0.5)),
    Case(
        name="GPT-2 4x256", layers=4, width=256, vocabulary=2000, batch=4, length=256, dtype="bfloat16", bars=(4, 0.5)
    ),
    Case(
        name="GPT-2 12x64", layers=12, width=64, vocabulary=2000, batch=1, length=32, dtype="bfloat16", bars=(26, 0.5)
    ),
)
ON_CUDA = (
    Case(
        name="GPT-2 124M", layers=12, width=768, vocabulary=50257, batch=8, length=1024, dtype="bfloat16", bars=(5, 1)
    ),
)


@dataclass(kw_only=True)
class Clock:
    """Seconds spent in what it wraps, and how often that was called."""

    seconds: float = 0.0
    calls: int = 0
    now: Callable[[], float] = time.thread_time

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self.now() - start
                self.calls += 1

        return inside


@dataclass(kw_only=True)
class Figures:
    """Of one way of watching: seconds per step, inside the hooks and in all."""

    inside: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    calls: int = 0


def model_of(case: Case, device: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=case.layers,
        n_embd=case.width,
        n_head=max(1, case.width // 64),
        vocab_size=case.vocabulary,
        n_positions=case.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(device=device, dtype=getattr(torch, case.dtype)).train()


def time_hooks(model: nn.Module, clock: Clock) -> None:
    """Put the clock around every hook of every module."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                hooks[number] = clock.timed(hook)


@contextlib.contextmanager
def nothing(_model: nn.Module) -> Iterator[None]:
    yield


@contextlib.contextmanager
def theirs(model: nn.Module) -> Iterator[None]:
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs

    Theirs(model)
    try:
        yield
    finally:
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_hooks_with_kwargs.clear()
            module._forward_hooks_always_called.clear()


@contextlib.contextmanager
def ours(model: nn.Module) -> Iterator[None]:
    with DebugUnderflowOverflow(model):
        yield


WAYS = {"nothing": nothing, "transformers": theirs, "frames": ours}


def measure_frames(case: Case, device: str, steps: int) -> dict[str, Figures]:
    model = model_of(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, case.vocabulary, (case.batch, case.length), device=device)
    figures = {way: Figures() for way in WAYS}
    for number in range(steps + 2):
        for way, attach in WAYS.items():
            clock = Clock(now=time.thread_time if device == "cpu" else time.perf_counter)
            with attach(model), contextlib.redirect_stdout(io.StringIO()):
                time_hooks(model, clock)
                start = time.perf_counter()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                wait(device)
                wall = time.perf_counter() - start
            if number >= 2:
                figures[way].inside.append(clock.seconds)
                figures[way].wall.append(wall)
                figures[way].calls = clock.calls
    return figures


def engine_of(case: Case, device: str, stage: int) -> Any:
    import deepspeed

    model = model_of(case, device).float()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def measure_engines(case: Case, device: str, steps: int, stage: int) -> dict[str, Figures]:
    """A DeepSpeed engine for each level and one without a watch, attached once, steps alternating."""
    from dsdoctor.overflow.watch.engine import watch

    figures = {way: Figures() for way in ("nothing", "guard", "frames")}
    engines = {way: engine_of(case, device, stage) for way in figures}
    clocks = {way: Clock(now=time.thread_time if device == "cpu" else time.perf_counter) for way in figures}
    for way, engine in engines.items():
        if way != "nothing":
            time_watch(engine, watch(engine, level=way), clocks[way])
    ids = torch.randint(0, case.vocabulary, (case.batch, case.length), device=device)
    for number in range(steps + 2):
        for way, engine in engines.items():
            clock = clocks[way]
            clock.seconds, clock.calls = 0.0, 0
            start = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            wait(device)
            wall = time.perf_counter() - start
            if number >= 2:
                figures[way].inside.append(clock.seconds)
                figures[way].wall.append(wall)
                figures[way].calls = clock.calls
    for engine in engines.values():
        engine.destroy()
    return figures


def time_watch(engine: Any, watching: Any, clock: Clock) -> None:
    """Put the clock around all that a watch does in a step."""
    for module in engine.module.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                if "dsdoctor" in getattr(hook, "__module__", ""):
                    hooks[number] = clock.timed(hook)
    adapter = watching._adapter
    for name in ("_on_decision", "_on_step", "_on_backward"):
        setattr(adapter, name, clock.timed(getattr(adapter, name)))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rows_of(case: Case, device: str, steps: int) -> list[dict[str, Any]]:
    frames = measure_frames(case, device, steps)
    engines = measure_engines(case, device, steps, stage=1)
    ways = [
        ("transformers", frames["transformers"], frames["nothing"], None),
        ("frames", frames["frames"], frames["nothing"], case.bars[0]),
        ("frames, engine", engines["frames"], engines["nothing"], case.bars[0]),
        ("guard", engines["guard"], engines["nothing"], case.bars[1]),
    ]
    if case.dtype == "float32":
        # here DeepSpeed does not look at the gradients at all, and the guard reads them itself
        alone = measure_engines(case, device, steps, stage=0)
        ways.append(("guard, ZeRO-0", alone["guard"], alone["nothing"], None))
    rows = []
    for way, figures, plain, bar in ways:
        step = statistics.median(plain.wall)
        rows.append(
            {
                "case": f"{case.name} {case.dtype} b{case.batch} s{case.length} V{case.vocabulary}",
                "way": way,
                "step_ms": round(1e3 * step, 2),
                "inside_ms": round(1e3 * statistics.median(figures.inside), 3),
                "inside_percent": round(100 * statistics.median(figures.inside) / step, 2),
                "wall_percent": round(100 * (statistics.median(figures.wall) / step - 1), 2),
                "hook_calls": figures.calls,
                "bar_percent": bar,
            }
        )
    return rows


def machine(device: str) -> dict[str, Any]:
    import deepspeed
    import transformers

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
        "measured_with": backend_of(torch.device(device)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", default="", help="only the cases with these words in their names")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", asked.device)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
    }.items():
        os.environ.setdefault(name, value)
    rows = [
        row
        for case in (ON_CPU if asked.device == "cpu" else ON_CUDA)
        if asked.case in f"{case.name} {case.dtype}"
        for row in rows_of(case, asked.device, asked.steps)
    ]
    print(f"{'case':46} {'way':14} {'step ms':>8} {'hooks ms':>9} {'hooks %':>8} {'wall %':>7} {'bar %':>6}")
    for row in rows:
        bar = "" if row["bar_percent"] is None else row["bar_percent"]
        print(
            f"{row['case']:46} {row['way']:14} {row['step_ms']:8.1f} {row['inside_ms']:9.2f} {row['inside_percent']:8.2f} "
            f"{row['wall_percent']:7.2f} {bar:>6}"
        )
    if asked.json:
        asked.json.write_text(
            json.dumps({"machine": machine(asked.device), "steps": asked.steps, "rows": rows}, indent=1) + "\n"
        )
    # on a GPU the hooks only queue their work: there the wall tells
    which = "inside_percent" if asked.device == "cpu" else "wall_percent"
    late = [row for row in rows if row["bar_percent"] is not None and row[which] > row["bar_percent"]]
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
