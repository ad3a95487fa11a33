"""A torch for CUDA 12 from PyPI on a machine without a CUDA 12 compiler: a wheel, without root. Minutes and gigabytes each."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.build_targets import targets_of
from dsdoctor.builder.targets import environment
from dsdoctor.builder.toolkit.debian import ask_distribution, fetch_package, find_mirrors
from dsdoctor.builder.toolkit.parts import label_of
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder, private_folder
from tests.builder.redist_server import Server, published, serving
from tests.wheel.conftest import dsdoctor, unpinned

pytestmark = [pytest.mark.wheel, pytest.mark.exhaustive]
LOAD = (
    "import sys, torch, importlib.machinery as m, importlib.util as u; l = m.ExtensionFileLoader('fused_adam_op', sys.argv[1]); \
s = u.spec_from_loader('fused_adam_op', l); l.exec_module(u.module_from_spec(s)); print('loaded')"
)
OF_PYPI = {
    "cuda_nvcc": "nvidia-cuda-nvcc-cu12==12.4.131",
    "cuda_cudart": "nvidia-cuda-runtime-cu12==12.4.127",
    "cuda_cccl": "nvidia-cuda-cccl-cu12==12.4.127.post1",
    "cuda_profiler_api": "nvidia-cuda-profiler-api-cu12==12.4.127",
}
"""Where the parts of NVIDIA's archives have CUDA 12.4.1 can be had beside the compiler, which Debian packages."""


def python_with(torch: str) -> str:
    """An environment with a torch of PyPI, as a matrix makes and keeps it."""
    host = LocalHost(env=unpinned())
    (target,) = targets_of((), (torch,), (), None)
    return environment(host, target, private_folder(cache_folder(host)), offline=False, say=print)


def built(python: str, tmp_path: Path, **more: str) -> dict[str, Any]:
    """Build fused_adam for one architecture with a toolkit that is assembled now, whatever lies here."""
    arguments = (
        "--python",
        python,
        "--ops",
        "fused_adam",
        "--arch",
        "8.0",
        "--toolkit",
        "pypi",
        "-o",
        str(tmp_path / "out"),
    )
    status, document = dsdoctor("build-wheel", *arguments, DSDOCTOR_CACHE=str(tmp_path / "cache"), **more)
    assert status == 0, document
    return document


def prove(document: dict[str, Any], python: str, tmp_path: Path) -> dict[str, Any]:
    """The wheel's op needs CUDA 12's runtime, holds sm_80 and nothing else, and loads where torch is; its plan's toolkit."""
    manifest: dict[str, Any] = json.loads(Path(document["manifest"]).read_text())
    (op,) = manifest["ops"]
    assert "libcudart.so.12" in op["needed"]
    assert op["sm_arch"] == ["80_real"]
    with zipfile.ZipFile(document["wheel"]) as wheel:
        file = wheel.extract(op["file"], tmp_path / "wheel")
    loaded = subprocess.run([python, "-c", LOAD, file], capture_output=True, text=True, check=False)
    assert loaded.stdout == "loaded\n", loaded.stderr
    toolkit: dict[str, Any] = manifest["plan"]["toolkit"]
    return toolkit


def test_without_nvidias_archives_the_distributions_compiler_builds_it(tmp_path: Path) -> None:
    python = python_with("2.8.0")

    document = built(python, tmp_path, DSDOCTOR_CUDA_REDIST="none")
    toolkit = prove(document, python, tmp_path)

    assert [package["name"] for package in toolkit["packages"]] == ["nvidia-cuda-toolkit"]
    assert [finding["rule"] for finding in document["findings"]] == ["cuda-torch-mismatch"]


@pytest.fixture
def real_archives(tmp_path: Path) -> dict[str, bytes]:
    """CUDA 12.4.1 in the layout of NVIDIA's archives, out of Debian's package and PyPI's wheels."""
    host, parts = LocalHost(), tmp_path / "parts"
    mirrors = find_mirrors(host)
    packages = ask_distribution(host, mirrors, tmp_path / "apt", "x86_64") if not isinstance(mirrors, str) else mirrors
    if isinstance(packages, str):
        pytest.skip(f"there is no nvcc 12.4 to be had: {packages}")
    compiler = next(package for package in packages if label_of(package) == "12.4.1")
    fetch_package(host, compiler, tmp_path / "apt", parts / "cuda_nvcc", print)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    for name, requirement in OF_PYPI.items():
        subprocess.run([*pip, str(tmp_path / name), requirement], env=unpinned(), check=True)
        (wheel,) = (tmp_path / name).iterdir()
        with zipfile.ZipFile(wheel) as file:
            file.extractall(tmp_path / f"{name}.wheel")
        (folder,) = (path for path in (tmp_path / f"{name}.wheel" / "nvidia").iterdir() if path.is_dir())
        for kind in ("include", "lib"):
            if (folder / kind).is_dir():
                (parts / name).mkdir(parents=True, exist_ok=True)
                (folder / kind).rename(parts / name / kind)
    (parts / "cuda_cudart/lib/libcudart.so").symlink_to("libcudart.so.12")
    return published("12.4.1", {folder.name: tarred(folder) for folder in parts.iterdir()})


def tarred(folder: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=0) as archive:
        archive.add(folder, arcname=f"{folder.name}-linux-x86_64-archive")
    return out.getvalue()


def test_the_very_release_is_made_of_nvidias_archives(real_archives: dict[str, bytes], tmp_path: Path) -> None:
    python = python_with("2.6.0")  # PyPI's is for CUDA 12.4

    with serving(real_archives) as server:
        document = built(python, tmp_path, DSDOCTOR_CUDA_REDIST=server.address, no_proxy="*")
        toolkit = prove(document, python, tmp_path)
        fetched = served(server)

    assert fetched == {*OF_PYPI}
    assert {archive["name"] for archive in toolkit["archives"]} == fetched
    assert (toolkit["release"], toolkit["fetch"], document["findings"]) == ({"major": 12, "minor": 4}, [], [])


def served(server: Server) -> set[str]:
    """The components that were fetched, each once."""
    names = [name.partition("/")[0] for name, _ in server.asked if name.endswith(".xz")]
    assert len(names) == len(set(names))
    return set(names)
