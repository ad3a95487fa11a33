"""`check --deep` against what pip really builds: one op of each kind, in three states of one machine.

CI tries the state in which most is built, but for the op that compiles longest; `pytest -m "wheel and exhaustive"` tries that
and the other states.
"""

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsdoctor.builder.source.fetch import lay_out
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder
from tests.wheel.conftest import dsdoctor

pytestmark = pytest.mark.wheel
OPS = {
    "utils": ("UTILS", "utils_op"),
    "fused_adam": ("FUSED_ADAM", "fused_adam_op"),
    "dc": ("DEEP_COMPILE", "dc_op"),
    "evoformer_attn": ("EVOFORMER_ATTN", "evoformer_attn_op"),
}
"""Host code only; GPU code; host code against CUDA's and NCCL's headers; a library that is not here."""

OF_LIBRARIES = ("cublas", "cusparse", "cusolver", "curand", "cufile", "cufft", "nccl", "npp", "nvjpeg")
State = Callable[[Path, Path], dict[str, str]]


def guessed(assembled: Path, folder: Path) -> dict[str, str]:
    """nvcc is a wrapper script on PATH: torch takes the folder above it for CUDA_HOME."""
    wrapper = folder / "prefix" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {assembled}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}


def without_library_headers(assembled: Path, folder: Path) -> dict[str, str]:
    """What the packages cuda-nvcc and nvidia-cuda-nvcc bring: the compiler and the runtime's headers."""
    home = folder / "home"
    (home / "include").mkdir(parents=True)
    (home / "bin").mkdir()
    for part in ("nvvm", "lib64"):
        (home / part).symlink_to(assembled / part)
    # nvcc takes its headers from beside the folder that it is called in: a link to that folder would lead to the whole toolkit
    for tool in (assembled / "bin").iterdir():
        (home / "bin" / tool.name).symlink_to(tool.resolve())
    for header in (assembled / "include").iterdir():
        if not header.name.startswith(OF_LIBRARIES):
            (home / "include" / header.name).symlink_to(header.resolve())
    return {"CUDA_HOME": str(home)}


def whole(assembled: Path, folder: Path) -> dict[str, str]:
    """The toolkit as dsdoctor assembled it."""
    return {"CUDA_HOME": str(assembled)}


@pytest.fixture(scope="session")
def assembled(cuda_python: str) -> Path:
    status, document = dsdoctor("toolkit", "--python", cuda_python, "--arch", "9.0")
    assert status == 0, document
    return Path(document["toolkit"])


@pytest.fixture(scope="session")
def tree(cuda_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest DeepSpeed's source."""
    host, folder = LocalHost(), tmp_path_factory.mktemp("deepspeed") / "source"
    return lay_out(host, "newest", folder, cache=cache_folder(host), python=cuda_python, offline=False).folder


def built_by_pip(op: str, python: str, tree: Path, folder: Path, env: dict[str, str]) -> bool:
    """Whether pip makes a wheel that holds the op, in a copy of the tree."""
    variable, stem = OPS[op]
    source = folder / op
    shutil.copytree(tree, source, symlinks=True)
    argv = [
        python,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder / "dist"),
        str(source),
    ]
    extra = {f"DS_BUILD_{variable}": "1", "DS_ENABLE_NINJA": "1", "MAX_JOBS": "2"}
    done = subprocess.run(argv, env={**env, **extra}, capture_output=True, text=True, timeout=1500)
    wheels = list((folder / "dist").glob("*.whl")) if done.returncode == 0 else []
    names = [name for path in wheels for name in zipfile.ZipFile(path).namelist()]
    shutil.rmtree(folder / "dist", ignore_errors=True)
    return any(Path(name).name.startswith(f"{stem}.") for name in names)


@pytest.mark.parametrize(
    ("state", "asked", "expected"),
    [
        pytest.param(guessed, {*OPS}, {"utils"}, marks=pytest.mark.exhaustive),
        pytest.param(without_library_headers, {*OPS}, {"utils"}, marks=pytest.mark.exhaustive),
        pytest.param(whole, {*OPS} - {"dc"}, {"utils", "fused_adam"}),
        pytest.param(whole, {*OPS}, {"utils", "fused_adam", "dc"}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_verdicts_are_what_the_compiler_says(
    state: State, asked: set[str], expected: set[str], cuda_python: str, assembled: Path, tree: Path, tmp_path: Path
) -> None:
    scripts = str(Path(cuda_python).parent)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA_", "PIP_CONSTRAINT"))
    }
    env = {**clean, "DS_ACCELERATOR": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0", **state(assembled, tmp_path)}
    env["PATH"] = f"{env['PATH']}:{scripts}" if state is guessed else f"{scripts}:{env['PATH']}"

    status, document = dsdoctor(
        "check", "--deep", "--python", cuda_python, "--source", str(tree), "--op", ",".join(sorted(asked)), env=env
    )
    outcomes = {op for op in asked if built_by_pip(op, cuda_python, tree, tmp_path / "pip", env)}

    said = {op["op"] for op in document["ops"] if op["op"] in asked and op["verdict"] == "builds"}
    reasons = {op["op"]: op["because"] for op in document["ops"] if op["op"] in asked}
    assert said == outcomes == expected, reasons
    assert status == 1, "evoformer_attn was asked for, and CUTLASS is not here"
    assert {op["mended"] for op in document["ops"] if op["op"] in expected} == {"builds"}
