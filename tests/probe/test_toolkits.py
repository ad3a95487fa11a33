from dataclasses import replace

from dsdoctor.core.machine import TAKEN, Cuda, Toolkit
from dsdoctor.probe.python import guessed_cuda_home
from dsdoctor.probe.toolkits import find_toolkits
from tests.conftest import Disk, nvcc_script

CUDA = "/usr/local/cuda-13.0"
HOST_CONFIG = "#if __GNUC__ > 15\n#error too new\n#if (__clang_major__ >= 21)\n"


def only(toolkits: tuple[Toolkit, ...]) -> Toolkit:
    """The one toolkit, beside the folder that torch would take, be it one or not."""
    found = [toolkit for toolkit in toolkits if toolkit.found_via != (TAKEN,)]
    assert len(found) == 1, found
    return replace(found[0], found_via=tuple(step for step in found[0].found_via if step != TAKEN))


def test_a_toolkit_is_read_whole(disk: Disk) -> None:
    host = disk(
        {
            f"{CUDA}/bin/nvcc": nvcc_script("13.0"),
            f"{CUDA}/include/cuda_runtime.h": "",
            f"{CUDA}/include/crt/host_config.h": HOST_CONFIG,
            f"{CUDA}/targets/x86_64-linux/include/curand_kernel.h": "",
            f"{CUDA}/include/cccl/cuda/std/version": "",
            f"{CUDA}/lib64/libcurand.so": "",
            f"{CUDA}/lib64/libcublas.so.13": "",
            f"{CUDA}/lib64/stubs/libcuda.so": "",
        }
    )

    assert only(find_toolkits(host, (), "/cache")) == Toolkit(
        root=CUDA,
        release=Cuda(13, 0),
        version="13.0.88",
        nvcc=f"{CUDA}/bin/nvcc",
        headers=frozenset({"cuda_runtime.h", "crt/host_config.h", "curand_kernel.h", "cccl"}),
        libraries=frozenset({"curand", "cuda"}),  # libcublas.so.13 alone cannot be linked
        scattered=frozenset({"curand_kernel.h"}),  # torch looks in include only
        include_dirs=(f"{CUDA}/include", f"{CUDA}/targets/x86_64-linux/include"),
        library_dirs=(f"{CUDA}/lib64", f"{CUDA}/lib64/stubs"),
        architectures=("8.0", "9.0"),
        newest_gcc=15,
        newest_clang=20,
        found_via=("usr_local",),
    )


def test_a_wrapper_script_on_path_leads_to_the_real_toolkit(disk: Disk) -> None:
    host = disk(
        {"/usr/local/bin/nvcc": nvcc_script(top="/opt/real/bin/.."), "/opt/real/bin/nvcc": nvcc_script()},
        PATH="/usr/local/bin",
    )

    found = only(find_toolkits(host, (), "/cache"))

    assert (found.root, found.found_via) == ("/opt/real", ("nvcc_on_path",))
    assert guessed_cuda_home(host) == "/usr/local"


def test_links_to_one_toolkit_are_one_toolkit(disk: Disk) -> None:
    host = disk(
        {f"{CUDA}/bin/nvcc": nvcc_script(top=f"{CUDA}/bin/..")},
        links={"/usr/local/cuda": CUDA, "/usr/bin/nvcc": f"{CUDA}/bin/nvcc"},
        PATH="/usr/bin",
        CUDA_HOME="/usr/local/cuda",
    )

    found = only(find_toolkits(host, (), "/cache"))

    assert found.found_via == ("cuda_home_variable", "nvcc_on_path", "usr_local")


def test_an_nvcc_that_fails_is_no_toolkit(disk: Disk) -> None:
    host = disk({f"{CUDA}/bin/nvcc": "#!/bin/sh\nexit 1\n"})

    found = only(find_toolkits(host, (), "/cache"))
    assert (found.nvcc, found.release, found.broken) == (None, None, "it ends with status 1 and prints nothing")


def test_torchs_own_wheels_are_headers_without_a_compiler(disk: Disk) -> None:
    site = "/venv/lib/python3.11/site-packages"
    host = disk(
        {
            f"{site}/nvidia/cu13/include/cuda_runtime.h": "",
            f"{site}/nvidia/cu13/include/cuda.h": "#define CUDA_VERSION 13020\n",
            f"{site}/nvidia/cu13/lib/libcublas.so.13": "",
            f"{site}/nvidia/nccl/include/nccl.h": "",
        }
    )

    found = only(find_toolkits(host, (site,), "/cache"))

    assert (found.nvcc, found.release, found.found_via) == (None, Cuda(13, 2), ("pypi_wheels",))
    assert found.headers == {"cuda_runtime.h", "nccl.h"}
    assert found.libraries == frozenset()


def test_the_wheels_of_cuda_12_are_one_folder_a_part(disk: Disk) -> None:
    site = "/venv/site-packages"
    host = disk(
        {
            f"{site}/nvidia/cuda_runtime/include/cuda_runtime.h": "",
            f"{site}/nvidia/cuda_runtime/include/cuda.h": "#define CUDA_VERSION 12080\n",
            f"{site}/nvidia/cusparse/include/cusparse.h": "",
        }
    )

    found = only(find_toolkits(host, (site,), "/cache"))

    assert (found.release, found.headers) == (Cuda(12, 8), frozenset({"cuda_runtime.h", "cusparse.h"}))


def test_debians_package_has_its_headers_in_usr_include(disk: Disk) -> None:
    host = disk(
        {
            "/usr/lib/nvidia-cuda-toolkit/bin/nvcc": nvcc_script("11.8"),
            "/usr/include/cuda_runtime.h": "",
            "/usr/lib/x86_64-linux-gnu/libcurand.so": "",
        },
        links={"/usr/bin/nvcc": "/usr/lib/nvidia-cuda-toolkit/bin/nvcc"},
        PATH="/usr/bin",
    )

    found = only(find_toolkits(host, (), "/cache"))

    assert (found.root, found.release) == ("/usr", Cuda(11, 8))
    assert found.libraries == {"curand"}


def test_conda_modules_and_ld_library_path_are_searched(disk: Disk) -> None:
    host = disk(
        {
            "/conda/env/bin/nvcc": nvcc_script("12.4"),
            "/conda/env/targets/x86_64-linux/include/cuda_runtime.h": "",
            "/sw/CUDA/12.6/bin/nvcc": nvcc_script("12.6"),
            "/data/cuda/lib64/libcudart.so.12": "",
            "/data/cuda/include/cuda_runtime.h": "",
            "/data/cuda/include/cuda.h": "#define CUDA_VERSION 12010\n",
        },
        CONDA_PREFIX="/conda/env",
        EBROOTCUDA="/sw/CUDA/12.6",
        LD_LIBRARY_PATH="/nowhere:/data/cuda/lib64",
    )

    found = {t.found_via: (t.root, str(t.release)) for t in find_toolkits(host, (), "/cache")}

    assert found == {
        ("conda",): ("/conda/env", "12.4"),
        ("module_variables",): ("/sw/CUDA/12.6", "12.6"),
        ("ld_library_path",): ("/data/cuda", "12.1"),
    }


def test_a_cuda_home_that_is_a_list_or_is_not_there_yields_nothing(disk: Disk) -> None:
    assert find_toolkits(disk({}, CUDA_HOME=":/usr/local/cuda", CUDA_PATH="/nonexistent"), (), "/cache") == ()


def test_ten_thousand_entries_on_path_are_no_trouble(disk: Disk) -> None:
    path = ":".join([*(f"/none/{number}" for number in range(10_000)), "/b[1]", "", "relative"])

    assert find_toolkits(disk({"/b[1]/nvcc": "#!/bin/sh\nexit 3"}, PATH=path), (), "/cache") == ()


def test_torch_takes_cuda_home_then_cuda_path_then_nvcc_then_usr_local(disk: Disk) -> None:
    files = {"/usr/local/cuda/x": "", "/opt/bin/nvcc": "#!/bin/sh\n"}

    assert guessed_cuda_home(disk(files, CUDA_HOME="/a", CUDA_PATH="/b")) == "/a"
    assert guessed_cuda_home(disk(files, CUDA_PATH="/b")) == "/b"
    assert guessed_cuda_home(disk(files, PATH="/opt/bin")) == "/opt"
    assert guessed_cuda_home(disk(files, PATH="/none")) == "/usr/local/cuda"
