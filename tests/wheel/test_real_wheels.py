"""Real DeepSpeed wheels from real compilers: minutes each, marked ``wheel``; they need a network and gcc."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.host import LocalHost
from tests.planted import COMPILED, WORDINGS, plant
from tests.wheel.conftest import dsdoctor, unpack_deepspeed

pytestmark = pytest.mark.wheel
IN_CI = os.environ.get("CI") == "true"
RUNTIME = ("einops", "hjson", "msgpack", "numpy", "packaging", "psutil", "py-cpuinfo", "pydantic>=2", "tqdm")
STALE = {"DS_BUILD_CUTLES_OPS": "1", "DS_BUILD_CPU_LION": "1", "CUDA_HOME": "/nonexistent"}
# not the linker's --defsym, whose very purpose is a name in the file
PLANTED = plant(("CFLAGS", "CXXFLAGS", "CPPFLAGS"), {name: WORDINGS[name] for name in COMPILED if name != "linker"})


def contents(wheel: str) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        assert file.testzip() is None
        return {Path(name).name.split(".")[0] for name in file.namelist() if name.endswith(".so")}


def digest(wheel: str) -> str:
    return hashlib.sha256(Path(wheel).read_bytes()).hexdigest()


def has_libaio() -> bool:
    present = bool(LocalHost().glob("/usr/include/libaio.h"))
    assert present or not IN_CI, "CI installs libaio-dev"
    return present


@pytest.fixture(scope="module")
def cpu_wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A CPU wheel for the torch of this very environment, built with a shell full of stale variables."""
    out = tmp_path_factory.mktemp("dist")
    ops = "cpu_adam,deepspeed_shm_comm"
    status, document = dsdoctor(
        "build-wheel", "--accelerator", "cpu", "--ops", ops, "-o", str(out), **STALE, **PLANTED.env
    )
    assert status == 0, document
    return document


def test_a_cpu_wheel_holds_what_was_asked_and_says_so(cpu_wheel: dict[str, Any]) -> None:
    manifest = json.loads(Path(cpu_wheel["manifest"]).read_text())

    assert contents(cpu_wheel["wheel"]) == {"cpu_adam_op", "deepspeed_shm_comm_op"}
    assert {op["op"]: (op["built"], op["because"]) for op in cpu_wheel["ops"]} == {
        "cpu_adam": (True, None),
        "deepspeed_shm_comm": (True, None),
    }
    assert manifest["accelerator"] == "cpu"
    assert any(flag.startswith("-march=") for flag in manifest["cpu_flags"])
    assert manifest["glibc"]
    assert all(op["loads"] for op in manifest["ops"])
    rules = {finding["rule"] for finding in cpu_wheel["findings"]}
    assert {"variable-misspelt", "variable-overridden", "cuda-home-wrong"} <= rules


def test_no_artefact_of_a_build_holds_a_token_of_the_shells_flags(cpu_wheel: dict[str, Any]) -> None:
    with zipfile.ZipFile(cpu_wheel["wheel"]) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    logs = Path(cpu_wheel["log"]).parent
    files |= {path.name: path.read_bytes() for path in (*logs.iterdir(), Path(cpu_wheel["manifest"]))}

    assert "build.log" in files
    assert any(name.endswith(".cdx.json") for name in files)
    assert {name: found for name, data in files.items() if (found := PLANTED.found_in(data.decode("latin-1")))} == {}
    assert PLANTED.found_in(json.dumps(cpu_wheel)) == []


def test_two_ranks_train_with_cpu_adam_from_the_wheel(cpu_wheel: dict[str, Any], tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    subprocess.run([*pip, *RUNTIME], check=True)
    subprocess.run([*pip, "--no-deps", cpu_wheel["wheel"]], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA_"))}
    env |= {"PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit")}
    env["REPORTS"] = str(tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

    done = subprocess.run(
        [*launch, str(Path(__file__).with_name("train.py"))], env=env, capture_output=True, text=True, timeout=900
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(report["last_loss"] < report["first_loss"] / 2 for report in reports)
    assert reports[0]["weights"] == reports[1]["weights"]
    assert all(report["op"].startswith(str(site)) for report in reports)
    assert not list((tmp_path / "jit").rglob("*.so")), "an op was compiled at run time although the wheel holds it"


def test_async_io_with_libaio_brings_pin_memory(tmp_path: Path) -> None:
    if not has_libaio():
        pytest.skip("libaio-dev is not installed")

    status, document = dsdoctor("build-wheel", "--accelerator", "cpu", "--ops", "async_io", "-o", str(tmp_path))

    assert status == 0, document
    assert contents(document["wheel"]) == {"async_io_op", "pin_memory_op"}
    assert {op["op"]: op["asked"] for op in document["ops"]} == {"async_io": True, "pin_memory": False}


def test_a_cuda_wheel_without_a_gpu_by_a_toolkit_from_pypi(cuda_python: str, tmp_path: Path) -> None:
    arguments = ("--python", cuda_python, "--arch", "9.0", "--ops", "fused_adam", "--toolkit", "pypi")
    source = ("--source", str(unpack_deepspeed(tmp_path / "a")))

    status, document = dsdoctor("build-wheel", *arguments, *source, "-o", str(tmp_path))

    assert status == 0, document
    manifest = json.loads(Path(document["manifest"]).read_text())
    assert contents(document["wheel"]) == {"fused_adam_op"}
    assert Path(document["wheel"]).name.startswith("deepspeed-")
    assert re.search(r"\+cu13\.0\.torch2\.14\.b[0-9a-f]{8}-", document["wheel"])
    assert manifest["nvidia"] == {
        "cuda_version_lower_bound": "13.0",
        "cuda_version_upper_bound": "13.0",
        "sm_arch": ["90_real"],
    }
    assert manifest["ops"][0]["loads"] is True
    assert any("nvcc" in requirement for requirement in document["toolkit"]["fetch"])

    elsewhere = ("--source", str(unpack_deepspeed(tmp_path / "another" / "folder")), "--no-cache")
    status, again = dsdoctor("build-wheel", *arguments, *elsewhere, "-o", str(tmp_path / "again"))

    assert status == 0, again
    assert [op["cached"] for op in again["ops"] if op["built"]] == [False]
    assert digest(again["wheel"]) == digest(document["wheel"])


def test_the_assembled_toolkit_is_found_again(cuda_python: str) -> None:
    status, document = dsdoctor("toolkit", "--python", cuda_python, "--arch", "9.0", "--offline")

    assert status == 0, document
    nvcc = LocalHost().run([f"{document['toolkit']}/bin/nvcc", "-V"], timeout=60)
    assert "release 13.0" in nvcc.stdout


def test_an_op_whose_source_does_not_compile_fails_with_the_compilers_words(tmp_path: Path) -> None:
    source = unpack_deepspeed(tmp_path / "unpacked")
    broken = source / "csrc" / "pin_memory" / "page_alloc.cpp"
    broken.write_text("#error this file is broken on purpose\n" + broken.read_text())
    before = sorted(path.relative_to(source) for path in source.rglob("*"))

    arguments = ("--accelerator", "cpu", "--ops", "pin_memory", "--source", str(source))
    status, document = dsdoctor("build-wheel", *arguments, "-o", str(tmp_path / "dist"))

    assert status == 4
    assert document["wheel"] is None
    assert "error: #error this file is broken on purpose" in document["ops"][0]["because"]
    assert sorted(path.relative_to(source) for path in source.rglob("*")) == before
    assert not list((tmp_path / "dist").iterdir())
