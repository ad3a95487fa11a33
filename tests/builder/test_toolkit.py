"""Assembling a toolkit out of small layers, with a real shell script for an nvcc."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.builder.toolkit.parts import EVERY_HEADER, MARK, PARTS
from dsdoctor.core.build_models import Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda

NVCC = """#!/bin/sh
if [ "$1" = -V ]; then echo "release 13.0, V13.0.88"; exit 0; fi
case "$*" in *sm_60*) echo "nvcc fatal   : Unsupported gpu architecture 'compute_60'" >&2; exit 1;; esac
for output; do :; done
echo "/* an empty linker script */" > "$output"
"""


def write(path: Path, text: str = "", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
def plan(tmp_path: Path) -> ToolkitPlan:
    """A toolkit with a compiler but without library headers, and a site-packages that has them."""
    base, wheels = tmp_path / "base", tmp_path / "site" / "nvidia" / "cu13"
    write(base / "bin" / "nvcc", NVCC, 0o755)
    write(base / "nvvm" / "bin" / "cicc", "#!/bin/sh\n", 0o755)
    for name in PARTS:
        folder = base if name in {"crt/host_config.h", "cuda_runtime.h"} else wheels
        write(folder / "include" / name if name != "cccl" else base / "include" / "cccl" / "thrust.h")
    write(wheels / "include" / "cuda_runtime.h", "the wheels' own")
    write(
        wheels / "include" / "cuda.h", "#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuInit(unsigned int Flags);"
    )
    write(wheels.parent / "nccl" / "include" / "nccl.h")
    write(wheels / "lib" / "libcurand.so.10")
    write(wheels / "lib" / "libcudart.so.13", "/* an empty linker script */")
    return ToolkitPlan(
        root=str(tmp_path / "cache" / "toolkits" / "13.0-abc" / "home"),
        release=Cuda(13, 0),
        assemble=True,
        headers=tuple(sorted(EVERY_HEADER)),
        layers=(
            Layer(include=(str(base / "include"),), libraries=(), tools=str(base / "bin")),
            Layer(
                include=(str(wheels / "include"), str(wheels.parent / "nccl" / "include")),
                libraries=(str(wheels / "lib"),),
            ),
        ),
    )


def made(plan: ToolkitPlan, arch: str = "9.0") -> Path:
    return assemble(
        LocalHost(), plan, python="/no", architectures=(arch,), compiler="/usr/bin/gcc", say=lambda line: None
    )


def test_layers_become_one_cuda_home(plan: ToolkitPlan) -> None:
    home = made(plan)

    assert LocalHost().run([f"{home}/bin/nvcc", "-V"], timeout=10).ok
    assert (home / "include" / "nccl.h").exists()
    assert (home / "include" / "cuda_runtime.h").read_text() == ""  # the first layer wins
    assert (home / "lib64" / "libcurand.so").resolve().name == "libcurand.so.10"
    assert (home / "nvvm" / "bin" / "cicc").exists()
    assert home.parent.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_stub_of_the_driver_library_is_needed_by_what_uses_it(plan: ToolkitPlan, tmp_path: Path) -> None:
    stubs = made(plan) / "lib64" / "stubs"
    (tmp_path / "op.c").write_text("int cuMemAlloc_v2(void); int op(void) { return cuMemAlloc_v2(); }")
    linked = ["gcc", "-shared", "-fPIC", "-Wl,--as-needed", "-o", tmp_path / "op.so", tmp_path / "op.c"]

    subprocess.run([*linked, f"-L{stubs}", "-lcuda"], check=True)

    needed = LocalHost().run(["readelf", "-d", str(tmp_path / "op.so")], timeout=20).stdout
    assert "[libcuda.so.1]" in needed


@pytest.mark.slow
def test_one_that_is_whole_is_taken_again_and_a_broken_one_made_anew(plan: ToolkitPlan) -> None:
    first = made(plan).parent.stat().st_ino
    second = made(plan).parent.stat().st_ino
    (Path(plan.root) / "include" / "nccl.h").unlink()
    (Path(plan.root) / "include" / "nccl.h").symlink_to("/gone")
    third = made(plan)

    assert first == second
    assert (third / "include" / "nccl.h").exists()


@pytest.mark.slow
def test_one_that_does_not_compile_is_not_left_behind(plan: ToolkitPlan) -> None:
    with pytest.raises(BuildFailed, match="Unsupported gpu architecture"):
        made(plan, "6.0")

    assert not Path(plan.root).exists()


@pytest.mark.slow
def test_a_trial_that_fails_does_not_take_a_good_toolkit_from_others(plan: ToolkitPlan) -> None:
    home = made(plan)

    with pytest.raises(BuildFailed, match="Unsupported gpu architecture"):
        made(plan, "6.0")
    assert (home / "bin" / "nvcc").exists()


@pytest.mark.slow
def test_only_one_that_passed_its_trial_is_marked_as_finished(plan: ToolkitPlan) -> None:
    assert (made(plan) / MARK).is_file()
    (Path(plan.root) / MARK).unlink()
    stray = Path(plan.root) / "stray"
    stray.touch()

    assert (made(plan) / MARK).is_file()
    assert not stray.exists()


@pytest.mark.slow
def test_one_that_lacks_a_header_is_not_left_behind(plan: ToolkitPlan) -> None:
    shutil.rmtree(Path(plan.layers[1].include[1]))

    with pytest.raises(BuildFailed, match=r"lacks nccl\.h"):
        made(plan)
    assert not Path(plan.root).exists()


def test_a_fetch_without_pip_is_an_error_with_the_next_step(plan: ToolkitPlan) -> None:
    fetching = ToolkitPlan(**{**plan.__dict__, "fetch": ("cuda-toolkit[nvcc]==13.0.*",)})
    script = Path(plan.root).parents[2] / "nopip"
    write(script, "#!/bin/sh\necho 'ERROR: no such version' >&2\ncase $* in *--version*) ;; *) exit 1;; esac", 0o755)

    with pytest.raises(BuildFailed, match="no such version"):
        assemble(
            LocalHost(), fetching, python=str(script), architectures=(), compiler="/usr/bin/gcc", say=lambda _: None
        )
    assert not Path(plan.root).parent.exists()


@pytest.mark.slow
def test_a_link_that_fails_tells_the_linkers_own_line(plan: ToolkitPlan) -> None:
    (Path(plan.layers[1].libraries[0]) / "libcudart.so.13").unlink()

    with pytest.raises(BuildFailed, match=r"does not link: \S*ld: cannot find -lcudart"):
        made(plan)
    assert not Path(plan.root).exists()
