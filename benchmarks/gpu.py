"""All that waits for a GPU, unattended: ``python benchmarks/gpu.py [FOLDER]``.

Runs the tests marked gpu, the kernel beside a device copy, and what watching costs in a GPT-2 124M step; writes their
figures, with machine and versions, to FOLDER (default: benchmarks/results).
"""

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
    )
    codes = [
        subprocess.run([sys.executable, *command], cwd=HERE.parent, check=False).returncode for command in commands
    ]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
