"""Logs of several ranks, made of templates: one rank fails by itself, the others say what follows, the launcher sums up."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

WORLD = 4
TRACEBACK = ["Traceback (most recent call last):", '  File "/w/train.py", line {line}, in main', "    {source}"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An own failure: its lines, the words by which it has to be named, and the code with which the process ends."""

    name: str
    lines: tuple[str, ...]
    words: tuple[str, ...]
    code: int = 1


def raised(name: str, exception: str, *words: str) -> Kind:
    """An exception with its traceback."""
    frames = [text.format(line=88, source="loss = run(batch)") for text in TRACEBACK]
    return Kind(name=name, lines=(*frames, exception), words=words)


KINDS = (
    raised("value", "ValueError: sample 4711 has 2049 tokens, at most 2048 are allowed", "sample 4711"),
    raised("key", "KeyError: 'labels'", "KeyError", "labels"),
    raised("index", "IndexError: list index 9 is not in the table", "index 9"),
    raised("type", "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'", "NoneType"),
    raised("own-class", "mypackage.errors.BrokenShard: shard 17 is not readable", "shard 17"),
    raised("file", "FileNotFoundError: [Errno 2] No such file or directory: '/data/part-3.bin'", "part-3.bin"),
    raised("disk", "OSError: [Errno 28] No space left on device: '/ckpt/step10'", "no space left"),
    raised("bare", "AssertionError", "AssertionError"),
    raised(
        "cuda", "RuntimeError: CUDA error: no kernel image is available for execution on the device", "kernel image"
    ),
    Kind(
        name="terminate",
        lines=("terminate called after throwing an instance of 'std::out_of_range'", "  what():  tile 9 of 4"),
        words=("std::out_of_range", "tile 9"),
        code=-6,
    ),
    Kind(
        name="assertion",
        lines=("python: /w/ops/kernel.cpp:31: void run(int): Assertion `tiles > 0' failed.",),
        words=("tiles > 0",),
        code=-6,
    ),
    Kind(name="segv", lines=(), words=("SIGSEGV",), code=-11),
    Kind(name="kill", lines=(), words=("SIGKILL",), code=-9),
)
CONSEQUENCES = (
    (
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 90, in main',
        "    engine.backward(loss)",
        '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce',
        "    work.wait()",
        "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. This is typically caused "
        "by a remote worker crashing.",
    ),
    (
        "[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, "
        "Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
        "Some NCCL operations have failed or timed out.",
    ),
    (
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 90, in main',
        "    engine.step()",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, ncclRemoteError: A call failed possibly "
        "due to a network error or a remote process exited",
    ),
)
STYLES = ("plain", "rank", "default", "srun", "wrapped", "pod")


def told(style: str, rank: int, lines: tuple[str, ...]) -> list[str]:
    """The lines as a launcher passes them on."""
    prefix = {
        "rank": f"[rank{rank}]: ",
        "default": f"[default{rank}]:",
        "srun": f"{rank}: ",
        "pod": f"[pod/train-worker-{rank}/pytorch] ",
    }.get(style, "")
    if style == "wrapped":
        whole = [part for line in lines for part in textwrap.wrap(line, 110, drop_whitespace=False) or [""]]
        return [f"[rank{rank}]: {part}" for part in whole]
    return [prefix + line for line in lines]


def summary(rank: int, code: int) -> list[str]:
    """torchrun's last words."""
    signal = {-6: "  (SIGABRT)", -9: "  (SIGKILL)", -11: "  (SIGSEGV)"}.get(code, "")
    return [
        f"E1122 10:38:48.765000 2297 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) "
        f"local_rank: {rank} (pid: 23{rank}) of binary: /v/bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-22_10:38:48",
        "  host      : localhost",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: 23{rank}){signal}",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        "=" * 60,
    ]


def steps(style: str) -> list[str]:
    """How the training went before."""
    return [line for number in range(1, 6) for line in told(style, 0, (f"step {number}/900 loss 1.{number}",))]


def log_of(kind: Kind, rank: int, position: str, style: str) -> list[str]:
    """The whole log. ``position``: whether the other ranks' consequences stand "before" or "after" the own failure."""
    others = [other for other in range(WORLD) if other != rank]
    follows = [
        line
        for number, other in enumerate(others)
        for line in told(style, other, CONSEQUENCES[number % len(CONSEQUENCES)])
    ]
    own = told(style, rank, kind.lines)
    middle = [*follows, *own] if position == "before" else [*own, *follows]
    if style == "pod":
        return [*steps(style), *middle, *told(style, rank, (f"command terminated with exit code {kind.code % 256}",))]
    ends = [f"srun: error: node1: task {rank}: Exited with exit code {kind.code % 256}"] if style == "srun" else []
    return [*steps(style), *middle, *(ends or summary(rank, kind.code))]
