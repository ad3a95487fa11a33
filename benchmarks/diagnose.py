"""How fast a log is read: makes logs of 50 MB, prints seconds. ``python benchmarks/diagnose.py [MEGABYTES]``."""

import io
import sys
import time

from dsdoctor.diagnosis.clean import raw_lines
from dsdoctor.diagnosis.diagnose import diagnose

TRAINING = "[2026-11-21 08:50:53,{n:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={n}, skipped=0, lr=[1e-05], loss=2.{n}\n"
COMPILE = (
    "[{n}/999] c++ -MMD -MF o{n}.o.d -DTORCH_EXTENSION_NAME=cpu_adam -I/venv/lib/python3.10/site-packages/deepspeed/ops/csrc/"
    "includes -isystem /venv/lib/python3.10/site-packages/torch/include -isystem /usr/local/cuda/include -fPIC -std=c++17 -O3 "
    "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -c a{n}.cpp -o o{n}.o\n"
)
WARNING = (
    "/venv/torch/include/c10/util/x.h:{n}:10: warning: unused variable in file module, error in shared memory {n}\n"
)
NEAR_MISS = (
    "x.h:{n}:1: fatal error: cusparse_{n}.h: gcc found, command 'ninja' failed with Errno 13, exit code of {n}\n"
)
KINDS = {
    "training": [TRAINING],
    "build": [COMPILE, WARNING, WARNING, WARNING],
    "commands": [COMPILE],
    "mixed": [TRAINING] * 20 + [COMPILE] + [WARNING] * 3,
    "near misses": [NEAR_MISS],
}


def made(lines: list[str], size: int) -> bytes:
    """A log of ``size`` bytes, every line unlike the others."""
    some, number, length = [], 0, 0
    while length < size:
        line = lines[number % len(lines)].format(n=number).encode()
        some.append(line)
        number, length = number + 1, length + len(line)
    return b"".join(some)


def main() -> None:
    """Time each kind of log."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 50) * 1_000_000
    for kind, lines in KINDS.items():
        log = made(lines, size)
        began = time.perf_counter()
        diagnosis = diagnose(raw_lines(io.BytesIO(log)))
        seconds = time.perf_counter() - began
        print(
            f"{kind:<12} {size // 1_000_000} MB {diagnosis.lines:>8} lines {seconds:5.1f} s  {diagnosis.outcome.value}"
        )


if __name__ == "__main__":
    main()
