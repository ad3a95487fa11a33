"""BuildPlan -> compiled ops, side by side under one pool of jobs, each in a build folder and with a log of its own."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.first_error import first_error
from dsdoctor.builder.nouns import BuildPlan, OpPlan
from dsdoctor.builder.pool import Pool
from dsdoctor.builder.processor import flags_of
from dsdoctor.host import INSIDE, LocalHost

NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")
SERIAL_STEP = re.compile(r"^\S*(?:g\+\+|c\+\+|gcc|clang\S*|nvcc) .* -c ")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Progress of one op: ``state`` is "waiting", "compiling", "built" or "failed"; objects done of ``total``."""

    op: str
    state: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """How one op's compilation ended. ``library`` is the shared object, None where there is none."""

    op: str
    library: Path | None
    seconds: float
    because: str | None
    log: Path


Watch = Callable[[Step], None]


def compile_ops(
    host: LocalHost, plan: BuildPlan, *, source: Path, folder: Path, logs: Path, watch: Watch
) -> tuple[Compiled, ...]:
    """Compile every op of a plan, the longest first; one that fails does not stop the others.

    On any interruption every compiler is ended before the exception goes on.
    """
    order = sorted(plan.ops, key=_weight, reverse=True)
    stopped = threading.Event()
    with Pool(folder, plan.jobs) as pool, ThreadPoolExecutor(max_workers=len(order)) as workers:

        def work(op: OpPlan) -> Compiled:
            with pool.token():
                if stopped.is_set():
                    return Compiled(op=op.op, library=None, seconds=0, because="interrupted", log=logs / f"{op.op}.log")
                env = child_environment(host, plan) | op_environment(plan, op) | pool.variables()
                return _compile(host, plan, op, env, source=source, folder=folder, logs=logs, watch=watch)

        for op in order:
            watch(Step(op=op.op, state="waiting", total=len(op.sources)))
        futures = [workers.submit(work, op) for op in order]
        try:
            return tuple(future.result() for future in futures)
        except BaseException:
            stopped.set()
            host.stop()
            raise


def child_environment(host: LocalHost, plan: BuildPlan) -> dict[str, str]:
    """The caller's environment without what steers builds, with what the plan sets."""
    env = {name: value for name, value in host.environment().items() if name not in plan.unset}
    env |= plan.env
    for name, folders in plan.prepend.items():
        env[name] = ":".join([*folders, *([env[name]] if env.get(name) else [])])
    return env


def op_environment(plan: BuildPlan, op: OpPlan) -> dict[str, str]:
    """The op's own architecture list: it cannot leak to another op."""
    if plan.accelerator != "cuda":
        return {}
    return {"TORCH_CUDA_ARCH_LIST": ";".join(op.architectures or plan.architectures)}


def _weight(op: OpPlan) -> int:
    return len(op.sources) * max(1, len(op.architectures) if op.device_code else 1)


def _compile(
    host: LocalHost,
    plan: BuildPlan,
    op: OpPlan,
    env: Mapping[str, str],
    *,
    source: Path,
    folder: Path,
    logs: Path,
    watch: Watch,
) -> Compiled:
    place, log = folder / "ops" / op.op, logs / f"{op.op}.log"
    place.mkdir(parents=True)
    how = "ninja" if plan.use_ninja else "serial"
    started, done, lines = time.monotonic(), 0, []
    watch(Step(op=op.op, state="compiling", total=len(op.sources)))
    with log.open("w", encoding="utf-8") as file:

        def on_line(line: str) -> None:
            nonlocal done
            file.write(line + "\n")
            lines.append(line)
            step = NINJA_STEP.match(line)
            if step or SERIAL_STEP.match(line):
                done = int(step[1]) if step else done + 1
                watch(Step(op=op.op, state="compiling", done=done, total=len(op.sources)))

        flags = json.dumps({"processor": flags_of(plan.processor), "debug_info": plan.debug_info})
        argv = [plan.python, str(INSIDE / "compile_op.py"), op.op, str(place), how, flags]
        status = host.stream(argv, cwd=source, env=env, on_line=on_line)
    library = shared_object(place / "lib", op.module) if status == 0 else None
    because = None if library else first_error(lines) or f"it ended with status {status} and named no error"
    watch(Step(op=op.op, state="built" if library else "failed", done=done, total=len(op.sources)))
    return Compiled(op=op.op, library=library, seconds=time.monotonic() - started, because=because, log=log)


def shared_object(folder: Path, module: str) -> Path | None:
    """The shared object of a dotted module name below a folder."""
    *packages, name = module.split(".")
    return next(iter(sorted(folder.joinpath(*packages).glob(f"{name}.*so"))), None)
