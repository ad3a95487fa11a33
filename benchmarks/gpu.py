"""All that waits for a GPU, unattended: ``python benchmarks/gpu.py [FOLDER]``.

Runs the tests marked gpu, the kernel beside a device copy, what watching costs in a GPT-2 124M step (the class and an engine's
levels, attached once, after warm steps), and comm with two NCCL ranks on one GPU; writes their figures, with machine and
versions, to FOLDER (default: benchmarks/results). Each part has a time limit. Fails where one of them fails, is ended by a
signal or by its limit, and says which.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds that it may take, its command, and where that one's stdout goes; None: to ours."""

    seconds: int
    command: Sequence[str]
    output: Path | None = None


def problem_of(
    command: Sequence[str], seconds: float, env: dict[str, str] | None = None, output: Path | None = None
) -> str:
    """Run a command, and say what became of it; empty: it ended well. What it started ends with it."""
    with output.open("wb") if output else contextlib.nullcontext() as written:
        child = subprocess.Popen(command, cwd=HERE.parent, env=env, stdout=written, start_new_session=True)
    try:
        code = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with status {code}" if code else ""


def parts(folder: Path) -> dict[str, Part]:
    """Each part by name."""
    day = time.strftime("%Y-%m-%d")
    python = sys.executable
    scan = [python, str(HERE / "scan.py"), "--json", str(folder / f"scan-gpu-{day}.json")]
    overflow = [str(HERE / "overflow.py"), "--device", "cuda", "--json", str(folder / f"overflow-gpu-{day}.json")]
    comm = [python, "-m", "dsdoctor", "comm", "--full", "--nproc", "2", "--backend", "nccl", "--json"]
    return {
        "tests": Part(seconds=1200, command=[python, "-m", "pytest", "-m", "gpu", "-q", "-rs"]),
        "scan": Part(seconds=300, command=scan),
        "overflow": Part(seconds=600, command=[python, *overflow]),
        "comm": Part(seconds=300, command=comm, output=folder / f"comm-gpu-{day}.json"),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    # NCCL refuses two ranks on one GPU unless this is set
    env = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    problems = {
        name: problem_of(part.command, part.seconds, env, part.output) for name, part in parts(folder.resolve()).items()
    }
    for name, problem in problems.items():
        print(f"{name:10} {problem or 'ended well'}")
    sys.exit(1 if any(problems.values()) else 0)


if __name__ == "__main__":
    main()
