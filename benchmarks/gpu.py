"""All that waits for a GPU, unattended: ``python benchmarks/gpu.py [FOLDER]``.

Runs the tests marked gpu, the kernel beside a device copy, what watching costs in a GPT-2 124M step, and comm with two
NCCL ranks on one GPU; writes their figures, with machine and versions, to FOLDER (default: benchmarks/results).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    day = time.strftime("%Y-%m-%d")
    commands = (
        ("-m", "pytest", "-m", "gpu", "-q"),
        (str(HERE / "scan.py"), "--json", str(folder / f"scan-gpu-{day}.json")),
        (str(HERE / "overflow.py"), "--device", "cuda", "--json", str(folder / f"overflow-gpu-{day}.json")),
        (
            "-m",
            "dsdoctor",
            "comm",
            "--full",
            "--nproc",
            "2",
            "--backend",
            "nccl",
            "--save",
            str(folder / f"comm-gpu-{day}.json"),
        ),
    )
    # NCCL refuses two ranks on one GPU unless this is set
    env = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    codes = [
        subprocess.run([sys.executable, *command], cwd=HERE.parent, env=env, check=False).returncode
        for command in commands
    ]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
