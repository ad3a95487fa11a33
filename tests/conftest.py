"""Fakes are machines: small real trees with real scripts in them, and Machines written out."""

import gc
import itertools
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from dsdoctor.builder.toolkit.parts import EVERY_HEADER
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Compiler, Cuda, Machine, Python, System, Toolkit, Torch

Disk = Callable[..., LocalHost]
COUNT = itertools.count()

# the quick suite tries a few; HYPOTHESIS_EXAMPLES=1000 looks harder
# whoever starts pytest may set it (xdist does), and then words would wrap there
os.environ.pop("COLUMNS", None)
settings.register_profile("dsdoctor", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "10")), deadline=None)
settings.load_profile("dsdoctor")


def pytest_configure() -> None:
    """What the modules and the list of tests hold lives until the end: it is not walked again and again for garbage."""
    gc.disable()
    # torch's threads spin while they wait for each other: on small tensors that is most of what they cost
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """From here on only what the tests make is looked through for garbage."""
    gc.freeze()
    gc.set_threshold(300_000, 20, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """What the last tests left shows here; pytest looks five times more, and Python as it ends."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own looks through the folders of all tests before it makes one."""
    made = tmp_path_factory.getbasetemp() / f"t{next(COUNT)}"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """``disk({"/usr/bin/nvcc": "#!/bin/sh\\n..."}, PATH="/usr/bin")``: a machine below tmp_path; scripts are executable."""

    def build(files: Mapping[str, str], links: Mapping[str, str] | None = None, **env: str) -> LocalHost:
        for name, text in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(path.stat().st_mode | stat.S_IXUSR)
        for name, target in (links or {}).items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(tmp_path / target.lstrip("/") if target.startswith("/") else target)
        return LocalHost(root=tmp_path, env=env)

    return build


def nvcc_script(release: str = "13.0", top: str = "") -> str:
    """A real script that answers like nvcc."""
    return (
        "#!/bin/sh\n"
        f'case "$1" in --dryrun) echo "#$ TOP={top}" >&2 ;;\n'
        '--list-gpu-arch) echo "compute_80 compute_90" | tr " " "\\n" ;;\n'
        f'*) echo "Cuda compilation tools, release {release}, V{release}.88" ;; esac\n'
    )


PYTHON = Python(
    executable="/venv/bin/python",
    version="3.11.7",
    tag="cp311",
    platform="linux-x86_64",
    site=("/venv/lib/python3.11/site-packages",),
    include="/usr/include/python3.11",
    headers=True,
    scripts="/venv/bin",
    packages={"setuptools": "84.2.1", "wheel": "0.48.0", "cuda-toolkit": "13.0.3.0"},
)
TORCH = Torch(
    version="2.14.1+cu130",
    location="/venv/lib/python3.11/site-packages/torch",
    cuda=Cuda(13, 0),
    cxx_standard=20,
    arch_list=("7.5", "8.0", "9.0"),
    known_architectures=("7.5", "8.0", "8.6", "9.0", "9.0a", "12.0"),
    gcc_bounds=(6, 16),
    nccl="2.30.7",
)
CPU_TORCH = Torch(version="2.13.0+cpu", location="/venv/lib/python3.11/site-packages/torch")
SYSTEM = System(architecture="x86_64", os="Debian", cpus=8, memory=64 << 30, cache_free=1 << 40, ninja="1.13.2")
GCC = Compiler(path="/usr/bin/g++", c_path="/usr/bin/gcc", kind="gcc", version=(12, 2, 0), found_via="path")
WHOLE = EVERY_HEADER


def toolkit(release: Cuda, **changes: object) -> Toolkit:
    """A whole toolkit of a release; ``changes`` make it sick."""
    root = f"/usr/local/cuda-{release}"
    facts: dict[str, object] = {
        "root": root,
        "release": release,
        "version": f"{release}.88",
        "nvcc": f"{root}/bin/nvcc",
        "headers": WHOLE,
        "libraries": frozenset({"cudart", "curand", "cufile", "cuda"}),
        "newest_gcc": 15,
        "found_via": ("usr_local",),
    }
    return Toolkit(**{**facts, **changes})  # type: ignore[arg-type]


def machine(**changes: object) -> Machine:
    """A healthy CUDA 13.0 machine without a toolkit; ``changes`` replace fields."""
    facts: dict[str, object] = {"system": SYSTEM, "python": PYTHON, "torch": TORCH, "compilers": (GCC,)}
    return Machine(**{**facts, **changes})  # type: ignore[arg-type]
