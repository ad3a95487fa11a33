"""Host -> GPUs and driver; processor, memory and disk as the control group limits them; build tools; variables that steer builds.

NVML is asked in a child process: no CUDA context, and a driver that hangs blocks only the child.
"""

import re
import sys
from dataclasses import dataclass

from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Cuda, Driver, Gap, Gpu, Python, System
from dsdoctor.probe.paths import SYSTEM_LIBRARIES

DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/proc/driver/nvidia")
"""Files that a loaded driver creates: Linux, WSL, Jetson."""
STEERING_PREFIXES = ("DS_BUILD_", "NVCC_")
STEERING = (
    *("DS_ACCELERATOR", "DS_ENABLE_NINJA", "DS_SKIP_CUDA_CHECK", "DS_IGNORE_CUDA_DETECTION", "DS_NVCC_THREADS"),
    *("DS_DEBUG_CUDA_BUILD", "DS_EVOFORMER_GPU_ARCH", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "CUDACXX"),
    *("MAX_JOBS", "PYTORCH_NVCC", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH"),
    *("CUTLASS_PATH", "CCL_ROOT", "CUDA_VISIBLE_DEVICES", "TORCH_EXTENSIONS_DIR", "PIP_NO_BUILD_ISOLATION"),
    *("TORCH_DONT_CHECK_COMPILER_ABI", "CUDA_INC_PATH"),
)
UNLIMITED = 1 << 60
ARM_PARTS = {
    "0x41 0xd08": "Cortex-A72",
    "0x41 0xd0c": "Neoverse-N1",
    "0x41 0xd40": "Neoverse-V1",
    "0x41 0xd49": "Neoverse-N2",
    "0x41 0xd4f": "Neoverse-V2",
    "0x41 0xd84": "Neoverse-V3",
    "0x41 0xd8e": "Neoverse-N3",
    "0x46 0x001": "A64FX",
    "0x48 0xd01": "Kunpeng-920",
    "0xc0 0xac3": "Ampere-1",
    "0xc0 0xac4": "Ampere-1a",
}
"""Names for the numbers of maker and processor in Arm's /proc/cpuinfo (the kernel's arch/arm64/include/asm/cputype.h)."""


@dataclass(frozen=True, kw_only=True)
class _NvmlAnswer:
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    absent: str | None = None


def ask_gpus(host: Host) -> tuple[tuple[Gpu, ...], Driver | None] | Gap:
    """The GPUs that NVML sees and the driver; nothing when no driver is loaded."""
    if not any(host.exists(device) for device in DEVICES):
        return (), None
    answer = parse_answer(host.ask(sys.executable, "ask_nvml.py", timeout=20), _NvmlAnswer, "gpus")
    if isinstance(answer, Gap):
        return answer
    if answer.driver is None:
        return Gap(question="gpus", reason=answer.absent or "it names no driver")
    return answer.gpus, Driver(version=answer.driver, cuda=Cuda.parse(answer.cuda))


def read_system(host: Host, python: Python | None, cache: str) -> System:
    """The machine's size and tools. ``cache`` is the folder whose disk the build will use."""
    scripts = python.scripts if python else ""
    beside, on_path = f"{scripts}/ninja" if scripts else "", host.which("ninja")
    ninja = beside if beside and host.exists(beside) else on_path
    return System(
        architecture=host.run(["/bin/uname", "-m"], timeout=10).stdout.strip() or "unknown",
        os=parse_os_release(host.search("/etc/os-release", r"^PRETTY_NAME=.*$")),
        glibc=parse_glibc(host.run(["/usr/bin/ldd", "--version"], timeout=10).stdout),
        cpus=max(1, min(host.cpus(), _quota(host) or host.cpus())),
        memory=memory_limit(host),
        cache_free=host.free(cache),
        ninja=_version(host, ninja),
        ninja_on_path=on_path is not None,
        ccache=host.which("ccache"),
        pip=python.packages.get("pip") if python else None,
        git=host.which("git"),
        apt_get=host.which("apt-get") if host.which("dpkg-deb") else None,
        cpu_model=_cpu_model(host),
        cpu_flags=parse_cpu_flags(host.search("/proc/cpuinfo", r"^(?:flags|Features)\s*:.*$", most=1)),
        glibcxx=_glibcxx(host),
        shared_memory=host.free("/dev/shm") if host.exists("/dev/shm") else None,
        container=_container(host),
    )


def steering_variables(host: Host) -> dict[str, str]:
    """The variables that change what a DeepSpeed build does.

    No other DS_* variable is read, because it may hold a secret.
    """
    found: dict[str, str] = {}
    for prefix in STEERING_PREFIXES:
        found |= host.variables(prefix)
    for name in STEERING:
        value = host.variable(name)
        if value is not None:
            found[name] = value
    return found


def memory_limit(host: Host) -> int | None:
    """Bytes this process may use: the least of the machine's memory and its control groups' limits (v1 and v2)."""
    limits = [parse_meminfo(host.search("/proc/meminfo", r"^MemTotal:.*$"))]
    for folder in _groups(host, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (host.read(f"{folder}/{name}") or "").strip()
            limits.append(int(text) if text.isdecimal() and int(text) < UNLIMITED else None)
    known = [limit for limit in limits if limit]
    return min(known) if known else None


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The instruction sets of ``/proc/cpuinfo`` ("flags" on x86, "Features" on Arm).

    >>> sorted(parse_cpu_flags("processor : 0\\nflags\\t\\t: fpu avx2 avx512f"))
    ['avx2', 'avx512f', 'fpu']
    """
    match = re.search(r"^(?:flags|Features)\s*:([^\n]*)", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def parse_cpu_model(cpuinfo: str) -> str | None:
    """The name of the first processor; Arm writes numbers.

    >>> parse_cpu_model("model name\\t: AMD EPYC 7B13")
    'AMD EPYC 7B13'
    >>> parse_cpu_model("CPU implementer\\t: 0x41\\nCPU part\\t: 0xd0c")
    'Neoverse-N1'
    """
    match = re.search(r"^model name\s*:\s*([^\n]*\S)", cpuinfo, re.MULTILINE)
    maker = re.search(r"^CPU implementer\s*:\s*(0x\w+)", cpuinfo, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(0x\w+)", cpuinfo, re.MULTILINE)
    if match or not maker or not part:
        return match[1] if match else None
    return ARM_PARTS.get(f"{maker[1]} {part[1]}", f"Arm processor {part[1]} of maker {maker[1]}")


def parse_os_release(text: str) -> str:
    """The pretty name of ``/etc/os-release``.

    >>> parse_os_release('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"')
    'Debian GNU/Linux 12 (bookworm)'
    """
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', text, re.MULTILINE)
    return match[1] if match else "Linux"


def parse_glibc(text: str) -> str | None:
    """The release from ``ldd --version``.

    >>> parse_glibc("ldd (Debian GLIBC 2.36-9+deb12u10) 2.36")
    '2.36'
    """
    match = re.search(r"(\d+\.\d+)\s*$", text.splitlines()[0]) if text.strip() else None
    return match[1] if match else None


def parse_meminfo(text: str) -> int | None:
    """MemTotal in bytes.

    >>> parse_meminfo("MemTotal:       24610000 kB")
    25200640000
    """
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def parse_cpu_max(text: str) -> int | None:
    """Whole processors of a v2 ``cpu.max`` ("quota period"), rounded up.

    >>> parse_cpu_max("150000 100000"), parse_cpu_max("max 100000")
    (2, None)
    """
    parts = text.split()
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[1]) == 0:
        return None
    return max(1, -(-int(parts[0]) // int(parts[1])))


def _cpu_model(host: Host) -> str | None:
    named = parse_cpu_model(host.search("/proc/cpuinfo", r"^model name\s*:.*$", most=1))
    return named or parse_cpu_model(host.search("/proc/cpuinfo", r"^CPU (?:implementer|part)\s*:.*$", most=2))


def _glibcxx(host: Host) -> str | None:
    """The newest GLIBCXX_ symbol version of the system's libstdc++: libstdc++.so.6.0.N holds those up to 3.4.N."""
    for folder in SYSTEM_LIBRARIES:
        match = re.search(r"\.so\.6\.0\.(\d{1,3})$", host.resolve(f"{folder}/libstdc++.so.6"))
        if match:
            return f"3.4.{match[1]}"
    return None


def _container(host: Host) -> str | None:
    """The kind of container or virtual Linux this is, by the files that each has."""
    if host.search("/proc/version", r"(?i)microsoft", most=1):
        return "wsl"
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}
    return next((kind for mark, kind in marks.items() if host.exists(mark)), None)


def _quota(host: Host) -> int | None:
    quotas = []
    for folder in _groups(host, "cpu"):
        quotas.append(parse_cpu_max(host.read(f"{folder}/cpu.max") or ""))
        quota = (host.read(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (host.read(f"{folder}/cpu.cfs_period_us") or "").strip()
        quotas.append(parse_cpu_max(f"{quota} {period}"))
    known = [quota for quota in quotas if quota]
    return min(known) if known else None


def _groups(host: Host, controller: str) -> list[str]:
    """The folders of this process's control group and its parents, v2 first, then v1's ``controller``."""
    folders: list[str] = []
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part and part != ".."]
        folders += [mount + "".join(f"/{part}" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders or ["/sys/fs/cgroup"]


def _version(host: Host, program: str | None) -> str | None:
    if program is None:
        return None
    answer = host.run([program, "--version"], timeout=20)
    return answer.stdout.strip() if answer.ok else None
