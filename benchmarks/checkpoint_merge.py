"""How much memory and time does a merge take, beside DeepSpeed's zero_to_fp32? A checkpoint of two ranks, ZeRO 1 and 3.

    python benchmarks/checkpoint_merge.py FOLDER --gigabytes 4 --rounds 3 --json FILE

FOLDER needs twice the space. Both write safetensors, in turns; what is measured is the peak resident memory of the process.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORLD = 2
MAKE = """
import sys, collections, torch
folder, stage, count, large = sys.argv[1], *map(int, sys.argv[2:])
sizes = [large] + [large // 10] * max(0, (count - large) // (large // 10))
shapes = collections.OrderedDict((f"layer{n}.weight", torch.Size([size])) for n, size in enumerate(sizes))
share = sum(-(-size // 2) for size in sizes) if stage == 3 else -(-sum(sizes) // 2)
common = dict(param_shapes=[shapes], buffer_names=[], shared_params={}, frozen_param_shapes=None, frozen_param_fragments=None,
              global_steps=1, dp_world_size=2, mp_world_size=1, checkpoint_parallel_dimensions=dict(pp_degree=1, tp_degree=1),
              ds_config=dict(zero_optimization=dict(stage=stage)), ds_version="0.19.8", module={})
for rank in range(2) if stage == 3 else [0]:
    name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(common, f"{folder}/{name}_model_states.pt")
for rank in range(2):
    flat = torch.randn(share)
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}},
             "param_groups": [{"lr": 0.001, "params": [0]}]}
    groups = {"fp32_flat_groups": [flat], "optimizer_state_dict": state} if stage == 3 else {
        "single_partition_of_fp32_groups": [flat], "base_optimizer_state": state}
    saved = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": 2 if stage == 3 else [2], **groups}}
    torch.save(saved, f"{folder}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
"""


def main() -> None:
    """Make, merge in turns, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [row for stage in (1, 3) for row in of_stage(given.folder, stage, given.gigabytes, given.rounds)]
    for row in rows:
        print(json.dumps(row))
    if given.json:
        given.json.write_text(
            json.dumps({"gigabytes": given.gigabytes, "cpus": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )


def of_stage(folder: Path, stage: int, gigabytes: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each tool."""
    tag = folder / "saved/global_step1"
    tag.mkdir(parents=True)
    (folder / "saved/latest").write_text(tag.name)
    count = int(gigabytes * 1e9 / 12)
    largest = count // 8
    run([sys.executable, "-c", MAKE, str(tag), str(stage), str(count), str(largest)])
    out = folder / "merged"
    tools = {
        "dsdoctor checkpoint --merge": [sys.executable, "-m", "dsdoctor", "checkpoint", str(folder / "saved"), "--merge", str(out)],
        "zero_to_fp32.py": [
            sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(folder / "saved"), str(out), "--safe_serialization",
        ],
        "dsdoctor checkpoint --deep": [sys.executable, "-m", "dsdoctor", "checkpoint", str(folder / "saved"), "--deep"],
        "dsdoctor checkpoint": [sys.executable, "-m", "dsdoctor", "checkpoint", str(folder / "saved")],
    }  # fmt: skip
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, command in tools.items():
            shutil.rmtree(out, ignore_errors=True)
            measured[name].append(run(command))
    size = sum(path.stat().st_size for path in tag.iterdir())
    shutil.rmtree(folder / "saved")
    shutil.rmtree(out, ignore_errors=True)
    return [
        {
            "stage": stage, "tool": name, "rounds": rounds, "checkpoint_gb": round(size / 1e9, 2),
            "largest_parameter_mib": math.ceil(largest * 4 / 2**20),
            "peak_mib": [round(memory) for memory, _ in runs], "seconds": round(statistics.median(took for _, took in runs), 1),
        }
        for name, runs in measured.items()
    ]  # fmt: skip


def run(command: list[str]) -> tuple[float, float]:
    """Run a command: its peak resident memory in MiB, and seconds. Raises RuntimeError where it fails."""
    began = time.monotonic()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_maxrss / 1024, time.monotonic() - began


if __name__ == "__main__":
    main()
