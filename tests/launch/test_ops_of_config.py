"""What `--for` names is all that a training loads: real two-rank trainings on the CPU, with every compiler barred.

Each configuration gets a DeepSpeed that has the ops `--for` names for it, and no other; the ops of those that are tried are
compiled once, for all.
"""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsdoctor.builder.source.op_loads import ops_of_config
from dsdoctor.builder.source.training_config import read_config, training_configs
from dsdoctor.core.host import LocalHost

NVME = {"device": "nvme", "nvme_path": "NVME", "pin_memory": False}
HJSON = """{
  train_micro_batch_size_per_gpu: 4
  // torch's own
  optimizer: {
    type: Adam
    params: { "lr": 0.001, "torch_adam": true }
  }
  zero_optimization: { "stage": 3 }
}"""


def training(optimizer: str, stage: int, **offload: object) -> str:
    """A ds_config.json; an optimizer of "" is the program's own."""
    named = {"optimizer": {"type": optimizer, "params": {"lr": 0.001}}} if optimizer else {}
    zero = {"stage": stage, **offload}
    return json.dumps({"train_micro_batch_size_per_gpu": 4, **named, "zero_optimization": zero})


HOST = {"device": "cpu"}
CONFIGS = {
    "own-optimizer": training("", 0),
    "adamw": training("AdamW", 1),
    "adam-all-on-host": training("Adam", 3, offload_optimizer=HOST, offload_param=HOST),
    "adamw-on-host": training("AdamW", 2, offload_optimizer=HOST),
    "adagrad-on-host": training("Adagrad", 1, offload_optimizer=HOST),
    "lion-on-host": training("Lion", 2, offload_optimizer=HOST),
    "torch-adam-in-hjson": HJSON,
    "nvme": training("AdamW", 3, offload_optimizer=NVME, offload_param=NVME),
}
REPEATED = ("adamw-on-host", "adagrad-on-host", "lion-on-host")
"""Another stage with cpu_adam, which adam-all-on-host and nvme load, and its two siblings: CI compares the tables that name them
with DeepSpeed's own calls."""
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed"),
]


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a DeepSpeed that has the ops of all configurations that are tried now, from a wheel that dsdoctor builds."""
    if not LocalHost().glob("/usr/include/libaio.h"):
        pytest.skip("needs libaio-dev")
    out = tmp_path_factory.mktemp("wheel")
    tried = [item.callspec.params["name"] for item in request.session.items if "package" in item.fixturenames]  # type: ignore[attr-defined]
    for name in tried:
        (out / name).write_text(CONFIGS[name])
    ops = ",".join(sorted({op for name in tried for op in ops_of(out / name)}))
    build = [sys.executable, "-m", "dsdoctor", "build-wheel", "--accelerator", "cpu", "--ops", ops, "-o", str(out)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "all")
    return out / "all"


def ops_of(config: Path) -> set[str]:
    """The ops that `--for` names for a configuration."""
    return set(ops_of_config(training_configs(read_config(config)), accelerator="cpu"))


def with_ops(package: Path, folder: Path, ops: set[str]) -> Path:
    """A copy of the package, of links, that has these ops alone, and says so."""
    shutil.copytree(package, folder, copy_function=os.link)
    for library in folder.rglob("*_op.*.so"):
        if library.name.partition("_op.")[0] not in ops:
            library.unlink()
    record = folder / "deepspeed" / "git_version_info_installed.py"
    text = record.read_text()
    listed = {name: name in ops for name in re.findall(r"'(\w+)': (?:True|False|1)", text.split("accelerator_name")[0])}
    record.unlink()
    record.write_text(re.sub(r"installed_ops=\{.*?\}", f"installed_ops={listed}", text))
    return folder


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in REPEATED)) for name in CONFIGS]
)
def test_a_training_with_the_named_ops_compiles_nothing(name: str, package: Path, tmp_path: Path) -> None:
    config, reports, extensions = tmp_path / "ds_config.json", tmp_path / "reports", tmp_path / "extensions"
    reports.mkdir()
    config.write_text(CONFIGS[name].replace("NVME", str(tmp_path / "nvme")))
    named = ops_of(config)
    barred = {"CC": "/bin/false", "CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(extensions), "DS_ACCELERATOR": "cpu"}
    environment = {
        **os.environ,
        **barred,
        "PYTHONPATH": str(with_ops(package, tmp_path / "site", named)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "train_for.py"), str(config), str(reports)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-6000:]
    for rank in (0, 1):
        report = json.loads((reports / f"{rank}.json").read_text())
        assert set(report["loaded"]) == named
        assert report["losses"][-1] < report["losses"][0]
    assert not list(extensions.rglob("*.so"))
