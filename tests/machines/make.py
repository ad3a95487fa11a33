"""Writes the snapshots beside this file: small trees that play machines, really searched, really asked, and recorded.

    python -m tests.machines.make          every layout but those that were recorded on real machines

The real ones, ``container-without-gpu.json`` and ``pypi-wheels.json``, come from ``dsdoctor machine record`` and are not made here.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsdoctor.core.host import LocalHost
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.probe import probe

HERE = Path(__file__).parent
PYTHON = "/venv/bin/python"
SITE = "/venv/lib/python3.11/site-packages"
EPYC = (
    "model name\t: AMD EPYC 7763 64-Core Processor\n"
    "flags\t\t: fpu sse4_1 sse4_2 pni ssse3 popcnt movbe avx avx2 fma f16c bmi1 bmi2 abm\n"
)
HEADERS = (
    *("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h", "cuda_profiler_api.h"),
    *("nccl.h", "cufile.h", "nvtx3/nvToolsExt.h", "cuda/std/version"),
)
LIBRARIES = ("cudart", "curand", "cublas", "cufile")


@dataclass(kw_only=True)
class Layout:
    """A machine to play: files (scripts begin with #!), links, variables, and what its Python and its driver answer."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    torch: str = "2.14.1+cu130"
    arch_list: str = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
    standard: int = 20
    bounds: str = "'13.0': ((6, 0, 0), (16, 0)), '12.8': ((6, 0, 0), (15, 0)), '12.4': ((6, 0, 0), (14, 0)),"
    driver: dict[str, Any] | None = None
    packages: dict[str, str] = field(default_factory=dict)
    system: str = "Ubuntu 22.04.5 LTS"
    glibc: str = "2.35"
    memory: int = 256
    deepspeed: str | None = None


def script(*cases: tuple[str, str], other: str = "exit 1") -> str:
    """A shell script that prints one of some texts, by its first argument's last part."""
    lines = [f"{pattern}) cat <<'END'\n{text}\nEND\n;;" for pattern, text in cases]
    return '#!/bin/sh\ncase "${1##*/}" in\n' + "\n".join(lines) + f"\n*) {other} ;;\nesac\n"


def nvcc(release: str, top: str) -> str:
    version = f"Cuda compilation tools, release {release}, V{release}.93"
    archs = {
        "11": "35 50 60 70 75 80 86 89 90",
        "12": "50 60 70 75 80 86 89 90 100 120",
        "13": "75 80 86 89 90 100 120",
    }
    listed = "\n".join(f"compute_{number}" for number in archs[release.split(".")[0]].split())
    dryrun = f'echo "#$ TOP={top}/bin/.." >&2'
    return script(("-V", version), ("--list-gpu-arch", listed), other=dryrun)


def toolkit(root: str, release: str, *, gcc: int, headers: str = "", libraries: str = "lib64") -> dict[str, str]:
    """A whole toolkit; ``headers`` is the folder of its headers below the root."""
    include = f"{root}/{headers or 'include'}"
    files = {f"{root}/bin/nvcc": nvcc(release, root)}
    files |= {f"{include}/{name}": "" for name in HEADERS}
    files[f"{include}/crt/host_config.h"] = f"#if __GNUC__ > {gcc}\n#error\n#endif\n"
    files |= {f"{root}/{libraries}/lib{name}.so": "" for name in LIBRARIES}
    return files | {f"{root}/{libraries}/stubs/libcuda.so": ""}


def gcc(version: str, *, at: str = "/usr/bin", suffix: str = "") -> dict[str, str]:
    said = f"g++ (Vendor {version}) {version}"
    both = script(("--version", said), ("-print-prog-name=cc1plus", "/usr/libexec/cc1plus"))
    return {f"{at}/g++{suffix}": both, f"{at}/gcc{suffix}": both}


def gpus(name: str, capability: str, count: int, driver: str, cuda: str) -> dict[str, Any]:
    listed = [
        {"index": n, "name": name, "uuid": f"GPU-{n}", "capability": capability, "memory": 80 << 30}
        for n in range(count)
    ]
    return {"driver": driver, "cuda": cuda, "gpus": listed}


def one_toolkit() -> Layout:
    return Layout(
        files=toolkit("/usr/local/cuda-12.8", "12.8", gcc=14) | gcc("11.4.0") | {"/usr/include/libaio.h": ""},
        links={
            "/usr/local/cuda": "/usr/local/cuda-12.8",
            "/usr/lib/x86_64-linux-gnu/libaio.so": "/usr/include/libaio.h",
        },
        torch="2.8.0+cu128",
        standard=17,
        driver=gpus("NVIDIA A100-SXM4-80GB", "8.0", 8, "570.124", "12.8"),
    )


def several_toolkits() -> Layout:
    files: dict[str, str] = {}
    for release, limit in (("11.8", 11), ("12.4", 13), ("13.0", 15)):
        files |= toolkit(f"/usr/local/cuda-{release}", release, gcc=limit)
    return Layout(
        files=files | gcc("12.3.0"),
        links={"/usr/local/cuda": "/usr/local/cuda-12.4"},
        env={"PATH": "/usr/local/cuda/bin:/usr/local/cuda-11.7/bin:/venv/bin:/usr/bin:/bin"},
        driver=gpus("NVIDIA H100 80GB HBM3", "9.0", 4, "580.65", "13.0"),
    )


def conda() -> Layout:
    prefix = "/home/user/miniconda3/envs/ds"
    files = toolkit(
        prefix, "12.8", gcc=14, headers="targets/x86_64-linux/include", libraries="targets/x86_64-linux/lib"
    )
    return Layout(
        files=files | gcc("13.2.0"),
        env={"CONDA_PREFIX": prefix, "PATH": f"{prefix}/bin:/usr/bin:/bin"},
        torch="2.8.0+cu128",
        standard=17,
        driver=gpus("NVIDIA RTX A6000", "8.6", 2, "570.124", "12.8"),
    )


def debian_package() -> Layout:
    files = toolkit("/usr/lib/nvidia-cuda-toolkit", "11.8", gcc=11)
    home = {name.replace("/usr/lib/nvidia-cuda-toolkit/include", "/usr/include"): text for name, text in files.items()}
    return Layout(
        files=home | gcc("12.2.0"),
        links={"/usr/bin/nvcc": "/usr/lib/nvidia-cuda-toolkit/bin/nvcc"},
        system="Debian GNU/Linux 12 (bookworm)",
        glibc="2.36",
        driver=gpus("NVIDIA GeForce RTX 3090", "8.6", 1, "580.65", "13.0"),
    )


def wsl() -> Layout:
    return Layout(
        files={
            **toolkit("/usr/local/cuda-13.0", "13.0", gcc=15),
            **gcc("13.3.0"),
            "/proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2",
            "/dev/dxg": "",
            "/usr/local/cuda-11.8/lib64/libcudart.so.11.0": "",
        },
        links={"/usr/local/cuda": "/usr/local/cuda-13.0"},
        env={"LD_LIBRARY_PATH": "/usr/local/cuda-11.8/lib64:/usr/lib/wsl/lib"},
        system="Ubuntu 24.04.2 LTS",
        glibc="2.39",
        memory=16,
        driver=gpus("NVIDIA GeForce RTX 4090", "8.9", 1, "581.15", "13.0"),
    )


def hpc_modules() -> Layout:
    return Layout(
        files=toolkit("/apps/CUDA/12.4.0", "12.4", gcc=13)
        | gcc("8.5.0")
        | gcc("12.3.0", at="/apps/GCCcore/12.3.0/bin"),
        env={
            "EBROOTCUDA": "/apps/CUDA/12.4.0",
            "CUDA_HOME": "/apps/CUDA/12.4.0",
            "PATH": "/usr/bin:/apps/CUDA/12.4.0/bin:/apps/GCCcore/12.3.0/bin:/bin",
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
        torch="2.6.0+cu124",
        standard=17,
        system="Rocky Linux 8.10 (Green Obsidian)",
        glibc="2.28",
        driver=gpus("NVIDIA A100-SXM4-40GB", "8.0", 4, "550.54", "12.4"),
    )


def old_driver() -> Layout:
    return Layout(
        files=toolkit("/usr/local/cuda-13.0", "13.0", gcc=15) | gcc("11.4.0"),
        links={"/usr/local/cuda": "/usr/local/cuda-13.0"},
        driver=gpus("Tesla V100-SXM2-32GB", "7.0", 8, "535.183", "12.2"),
    )


def runtime_image() -> Layout:
    record = (
        "version='0.19.8+cu13.0.torch2.14'\ninstalled_ops={'cpu_adam': True, 'fused_adam': True, 'utils': True}\n"
        "accelerator_name='cuda'\ntorch_info={'version': '2.14', 'cuda_version': '13.0'}\n"
    )
    manifest = {
        "schema": "dsdoctor-manifest/1",
        "version": "0.19.8+cu13.0.torch2.14",
        "accelerator": "cuda",
        "torch": "2.14.1+cu130",
        "nvidia": {"cuda_version_lower_bound": "13.0"},
        "glibc": "2.34",
        "glibcxx": "3.4.30",
        "cpu_flags": ["-march=x86-64-v3", "-mavx2"],
        "ops": [{"op": "fused_adam", "sm_arch": ["80_real", "90_real"]}],
    }
    info = f"{SITE}/deepspeed-0.19.8+cu13.0.torch2.14.dist-info"
    ops = {"adam/cpu_adam_op": "", "adam/fused_adam_op": "", "utils_op": ""}
    return Layout(
        files={
            "/.dockerenv": "",
            f"{SITE}/deepspeed/git_version_info_installed.py": record,
            f"{info}/dsdoctor.json": json.dumps(manifest),
            f"{info}/WHEEL": "Tag: cp311-cp311-linux_x86_64\n",
            **{f"{SITE}/deepspeed/ops/{name}.cpython-311-x86_64-linux-gnu.so": text for name, text in ops.items()},
        },
        system="Debian GNU/Linux 12 (bookworm)",
        glibc="2.36",
        deepspeed="0.19.8+cu13.0.torch2.14",
        packages={"deepspeed": "0.19.8+cu13.0.torch2.14"},
        driver=gpus("NVIDIA H100 80GB HBM3", "9.0", 1, "580.65", "13.0"),
    )


LAYOUTS: tuple[Callable[[], Layout], ...] = (
    one_toolkit,
    several_toolkits,
    conda,
    debian_package,
    wsl,
    hpc_modules,
    old_driver,
    runtime_image,
)


def python_script(layout: Layout) -> str:
    """The interpreter of the environment: its answers are canned, its torch is files."""
    environment = {
        "python": {
            "executable": PYTHON,
            "version": "3.11.7",
            "tag": "cp311",
            "platform": "linux-x86_64",
            "site": [SITE],
            "include": "/usr/include/python3.11",
            "headers": True,
            "scripts": "/venv/bin",
            "packages": {
                "setuptools": "80.9.0",
                "pip": "24.0",
                "torch": layout.torch,
                "ninja": "1.13.0",
                **layout.packages,
            },
        },
        "torch": f"{SITE}/torch",
        "deepspeed": f"{SITE}/deepspeed" if layout.deepspeed else None,
    }
    count = [gpu["capability"] for gpu in (layout.driver or {}).get("gpus", [])]
    torch = {"arch_list": layout.arch_list.split(), "nccl": "2.27.3", "capabilities": count}
    return script(
        ("ask_python.py", "DSDOCTOR " + json.dumps(environment)),
        ("ask_torch.py", "DSDOCTOR " + json.dumps(torch)),
    )


def files_of(layout: Layout) -> dict[str, str]:
    """Everything that the machine holds."""
    cuda = layout.torch.partition("+cu")[2]
    release = f"{cuda[:-1]}.{cuda[-1]}"
    known = "'7.0', '7.5', '8.0', '8.6', '8.9', '9.0', '9.0a', '10.0', '12.0'"
    return {
        PYTHON: python_script(layout),
        "/venv/bin/ninja": script(("--version", "1.13.0")),
        "/bin/uname": script(("-m", "x86_64")),
        "/usr/bin/ldd": script(("--version", f"ldd (GNU libc) {layout.glibc}")),
        "/etc/os-release": f'PRETTY_NAME="{layout.system}"\n',
        "/proc/meminfo": f"MemTotal: {layout.memory << 20} kB\n",
        "/proc/cpuinfo": EPYC,
        "/dev/shm/.keep": "",
        "/dev/nvidiactl" if layout.driver else "/dev/null.keep": "",
        f"{SITE}/torch/version.py": f"__version__ = '{layout.torch}'\ncuda: Optional[str] = '{release}'\n",
        f"{SITE}/torch/include/ATen/ATen.h": f"#if __cplusplus < 20{layout.standard}02L\n",
        f"{SITE}/torch/utils/cpp_extension.py": f"CUDA_GCC_VERSIONS: X = {{{layout.bounds}}}\nsupported_arches = [{known}]\n",
        sys.executable: script(("ask_nvml.py", "DSDOCTOR " + json.dumps(layout.driver or {"absent": "no driver"}))),
        **layout.files,
    }


def lay_out(layout: Layout, root: Path) -> LocalHost:
    """Write the tree, and open the door to it."""
    for name, text in files_of(layout).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
    for name, target in layout.links.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(root / target.lstrip("/"))
    env = {"PATH": "/venv/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/home/user", **layout.env}
    return LocalHost(root=root, env=env)


def record(layout: Layout, file: Path, source: Any) -> None:
    """Ask the machine everything and write it down."""
    with tempfile.TemporaryDirectory() as folder:
        # the limits of the machine that plays are not those of the one that is played
        os.sched_getaffinity = lambda _: set(range(64))  # type: ignore[assignment]
        recorder = Recorder(lay_out(layout, Path(folder)))
        probe(recorder, python=PYTHON, cache="/home/user/.cache/dsdoctor")
        snapshot = recorder.snapshot
        snapshot.python, snapshot.cache, snapshot.source = PYTHON, "/home/user/.cache/dsdoctor", source
        for question in [key for key in snapshot.answers if key.startswith("free\x1f")]:
            snapshot.answers[question] = 500 << 30
        save(snapshot, file, home="/home/user")


def main() -> None:
    """Write every layout."""
    source = json.loads((HERE / "container-without-gpu.json").read_text(encoding="utf-8"))["source"]
    for make in LAYOUTS:
        layout = make()
        because = "it is installed here" if layout.deepspeed else source["because"]
        record(layout, HERE / f"{make.__name__.replace('_', '-')}.json", {**source, "because": because})


if __name__ == "__main__":
    main()
