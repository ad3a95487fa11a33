"""`dsdoctor.run` under real launchers, two ranks of gloo: the script gets what its launcher gave, and is watched.

Needs DeepSpeed. `python -m pytest -m launch tests/launch/test_run_launchers.py` takes two to three minutes.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent
TRAIN, TRAINER = str(HERE / "train.py"), str(HERE / "hf_trainer.py")
OURS = ("-m", "dsdoctor.run", "--overflow", "frames")
AS_RANK = (
    'export RANK="$OMPI_COMM_WORLD_RANK" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE";'
    'exec "$@"'
)
"""DeepSpeed would ask mpi4py for these."""

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed"),
]


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def deepspeed(*rest: str) -> list[str]:
    return [str(SCRIPTS / "deepspeed"), "--num_gpus", "2", "--master_port", free_port(), *rest]


def torchrun(*rest: str) -> list[str]:
    return [str(SCRIPTS / "torchrun"), "--nproc_per_node", "2", "--master_port", free_port(), *rest]


def accelerate(*rest: str) -> list[str]:
    one_machine = ["--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [
        str(SCRIPTS / "accelerate"),
        "launch",
        "--use_deepspeed",
        *one_machine,
        "--main_process_port",
        free_port(),
        *rest,
    ]


def mpirun(*rest: str) -> list[str]:
    if not shutil.which("mpirun"):
        pytest.skip("needs Open MPI's mpirun")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-n", "2", "sh", "-c", AS_RANK, "-", sys.executable, *rest]


def ranks_by_hand(*rest: str) -> list[str]:
    """As a cluster's own scripts and srun do: a process each, told by variables who it is."""
    per_rank = 'RANK=$0 LOCAL_RANK=$0 WORLD_SIZE=2 "$@"'
    both = f"sh -c '{per_rank}' 0 \"$@\" & first=$!; sh -c '{per_rank}' 1 \"$@\" || exit; wait $first"
    return ["sh", "-c", both, "-", sys.executable, *rest]


def under_us(*rest: str) -> list[str]:
    """The launcher itself under dsdoctor: the ranks that it starts are watched."""
    return [sys.executable, *OURS, "-m", "torch.distributed.run", *rest]


def launched(command: Sequence[str], **env: str) -> "subprocess.CompletedProcess[str]":
    around = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    around |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **around, **env})


def saw(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """What each rank said, in rank order."""
    lines = [line.partition("SAW ")[2] for line in done.stdout.splitlines() if "SAW " in line]
    return sorted(map(json.loads, lines), key=lambda rank: rank["rank"])


@pytest.mark.parametrize(
    ("command", "first"),
    [
        pytest.param(lambda: deepspeed("--module", *OURS[1:], TRAIN, "--x", "1"), "--local_rank={}", id="deepspeed"),
        pytest.param(lambda: torchrun(*OURS, TRAIN, "--x", "1"), "", id="torchrun"),
        pytest.param(lambda: accelerate(*OURS, TRAIN, "--x", "1"), "", id="accelerate"),
        pytest.param(lambda: mpirun(*OURS, TRAIN, "--x", "1"), "", id="mpirun"),
        pytest.param(lambda: ranks_by_hand(*OURS, TRAIN, "--x", "1"), "", id="by hand"),
        pytest.param(lambda: [sys.executable, *OURS, TRAIN, "--spawn", "2", "--x", "1"], "--spawn 2", id="spawn"),
        pytest.param(lambda: under_us(*torchrun(TRAIN, "--x", "1")[1:]), "", id="before torchrun"),
    ],
)
def test_both_ranks_train_and_are_watched(command: Any, first: str) -> None:
    done = launched(command())

    assert done.returncode == 0, done.stderr
    argv = [[*first.format(rank).split(), "--x", "1"] for rank in range(2)]
    assert saw(done) == [
        {"rank": rank, "world": 2, "steps": 3, "argv": argv[rank], "watched": True} for rank in range(2)
    ]
    assert "is not watched" not in done.stderr


def test_a_rank_that_fails_is_explained_by_its_own_traceback_and_the_launcher_sees_its_exit() -> None:
    done = launched(deepspeed("--module", *OURS[1:], TRAIN, "--fail", "1"))

    assert done.returncode == 1
    assert "[rank1]: Exception: Current loss scale already at minimum" in done.stderr
    assert (
        "dsdoctor [rank 1]: what this failure means:\ndsdoctor [rank 1]: ✗ fp16 overflowed on every step" in done.stderr
    )
    assert "dsdoctor/script.py" not in done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_an_unmodified_trainer_script_is_watched() -> None:
    stage = 3
    done = launched(deepspeed("--module", *OURS[1:], TRAINER), ZERO=str(stage))

    assert done.returncode == 0, done.stderr
    seen = [(rank["world"], rank["argv"], rank["losses"], rank["engine"], rank["stage"]) for rank in saw(done)]
    assert seen == [(2, [f"--local_rank={rank}"], 3, "DeepSpeedEngine", stage) for rank in range(2)]
    assert "is not watched" not in done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ([], {"ZERO": "2"}, "on all 2 ranks: the model"),
        (["--overflow", "frames", "--on-overflow", "raise"], {"ZERO": "3", "PLANT_RANK": "1"}, "on rank 1 of 2 only"),
    ],
    ids=["guard", "frames, one rank, raise"],
)
def test_an_overflow_planted_in_a_trainer_script_is_found(options: list[str], env: dict[str, str], said: str) -> None:
    launcher = deepspeed("--module", "dsdoctor.run", *options, TRAINER)
    done = launched(launcher, PLANT="transformer.h.1.mlp", BF16="1", **env)
    verdict = next(line for line in done.stderr.splitlines() if "dsdoctor: ✗" in line)

    assert "transformer.h.1.mlp (GPT2MLP) made" in verdict
    assert said in verdict
    assert "[overflow-in-module]" in verdict
    assert (done.returncode == 0) is ("raise" not in options)
    assert done.stderr.count("OverflowDetected: dsdoctor: transformer.h.1.mlp") == (2 if "raise" in options else 0)


LOADER = """
import sys, torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context=context)
        print(context, [int(one) for one in loader], type(loader.dataset).__module__)
    print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)))
"""
ENDS: Mapping[str, str] = {
    "says.py": "import sys; print(sys.argv, sys.path, __spec__ and __spec__.name, __file__); raise KeyError('x')",
    "wrong.py": "def f(:\n",
    "text.py": "import atexit, sys; atexit.register(print, 'last'); sys.exit('text')",
    "number.py": "import sys; sys.exit(7)",
    "hard.py": "import os; print('x', flush=True); os._exit(3)",
    "interrupted.py": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "thread.py": "import threading; threading.Thread(target=lambda: 1 / 0, name='t').start()",
    "loader.py": LOADER,
}


@pytest.mark.parametrize("script", [*ENDS, "folder", "empty", "archive.zip", "-m module", "-m nowhere"])
def test_a_script_ends_as_without_us(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {**ENDS, "folder/__main__.py": ENDS["says.py"], "module.py": ENDS["says.py"]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("__main__.py", ENDS["says.py"])
    plain, ours = (
        launched([sys.executable, *before, *script.split(), "--overflow", "x"])
        for before in ((), ("-m", "dsdoctor.run", "--overflow", "off"))
    )

    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_signal_meets_the_script_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "dsdoctor.run", str(tmp_path / "train.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()

    assert process.returncode == -signal.SIGTERM
