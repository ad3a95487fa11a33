"""How fast logs of 50 MB are read from a file: prints seconds and memory. ``python benchmarks/diagnose.py [MEGABYTES [KIND]]``."""

import resource
import sys
import tempfile
import time
from pathlib import Path

from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.lines import raw_lines

TRAINING = "[2026-11-21 08:50:53,{n:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={n}, skipped=0, lr=[1e-05], loss=2.{n}\n"
COMPILE = (
    "[{n}/999] c++ -MMD -MF o{n}.o.d -DTORCH_EXTENSION_NAME=cpu_adam -I/venv/lib/python3.10/site-packages/deepspeed/ops/csrc/"
    "includes -isystem /venv/lib/python3.10/site-packages/torch/include -isystem /usr/local/cuda/include -fPIC -std=c++17 -O3 "
    "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -c a{n}.cpp -o o{n}.o\n"
)
WARNING = (
    "/venv/torch/include/c10/util/x.h:{n}:10: warning: unused variable in file module, error in shared memory {n}\n"
)
RANKS = [
    f"[default{rank}]:[2026-11-21 08:50:53,{{n:03d}}] [INFO] [logging.py:96:log_dist] [Rank {rank}] step={{n}}, skipped=0, "
    "lr=[1e-05], loss=2.{n}\n"
    for rank in range(8)
]
MANY_RANKS = [
    *(
        f"[rank{rank}]: 2026-11-21 08:50:53,{{n:03d}} trainer.py:214 step={{n}} loss=2.{{n}} grad_norm=0.7 tokens/s=10{{n}}\n"
        for rank in range(64)
    ),
    *(
        f"[rank{rank}]: node-{rank // 8}:{4000 + rank}:{{n}} [{rank % 8}] NCCL INFO Channel {{n}}/0 : {rank} -> 0 via P2P/CUMEM\n"
        for rank in range(64)
    ),
    "[rank7]: /v/lib/python3.11/site-packages/torch/x.py:{n}: UserWarning: in step {n} a tensor was copied\n",
]
BAR = "\r {n}%|###    | {n}/999999 [08:15<40:57,  4.20s/it]"
NEAR_MISS = (
    "x.h:{n}:1: fatal error: cusparse_{n}.h: gcc found, command 'ninja' failed with Errno 13, exit code of {n}\n"
)
KINDS = {
    "training": [TRAINING],
    "build": [COMPILE, WARNING, WARNING, WARNING],
    "commands": [COMPILE],
    "mixed": [TRAINING] * 20 + [COMPILE] + [WARNING] * 3,
    "ranks": RANKS * 6 + ["[default1]:/v/x.py:{n}: UserWarning: nan in a column, error in memory\n"],
    "64 ranks": MANY_RANKS,
    "bars": [BAR] * 40 + ["\n"],
    "near misses": [NEAR_MISS],
}


END = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/w/train.py", line 7, in main\n'
    "[rank1]:     run(batch)\n"
    "[rank1]: KeyError: 'labels'\n"
)


def write(path: Path, lines: list[str], size: int) -> None:
    """A log of ``size`` bytes, every line unlike the others, and an exception at its end."""
    number, length = 0, 0
    with path.open("wb") as log:
        while length < size:
            line = lines[number % len(lines)].format(n=number).encode()
            log.write(line)
            number, length = number + 1, length + len(line)
        log.write(b"\n" + END.encode())


def main() -> None:
    """Time each kind of log, read from a file as the command reads it."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 50) * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        for kind, lines in KINDS.items():
            if len(sys.argv) > 2 and kind != sys.argv[2]:
                continue
            path = Path(folder) / "run.log"
            write(path, lines, size)
            began, worked = time.perf_counter(), time.process_time()
            with path.open("rb") as stream:
                diagnosis = diagnose(raw_lines(stream))
            seconds, work = time.perf_counter() - began, time.process_time() - worked
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{kind:<12} {size // 1_000_000} MB {diagnosis.lines:>8} lines {seconds:5.1f} s, {work:5.1f} of the processor, "
                f"{most} MB at most  {diagnosis.outcome.value}"
            )


if __name__ == "__main__":
    main()
