"""NCCL for real: two ranks on one GPU, which NCCL 2.30 allows where it is asked to."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_two_nccl_ranks_on_one_gpu_exchange_and_tell_their_transport() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.nccl.version() < (2, 30):
        pytest.skip("needs a GPU, and NCCL 2.30")
    env = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    argv = [sys.executable, "-m", "dsdoctor", "comm", "--nproc", "2", "--backend", "nccl", "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    report = json.loads(done.stdout)["report"]

    assert done.returncode in {0, 6}, done.stdout + done.stderr
    assert report["backend"] == "nccl"
    assert report["exchanges"] > 100
    assert set(report["transports"]) == {"0 -> 1", "1 -> 0"}
