"""An environment's Python and its torch: packages, the installed DeepSpeed, ops compiled at run time, and torch."""

import glob
import re
from dataclasses import dataclass, replace

from dsdoctor.core.children import parse_answer
from dsdoctor.core.deepspeed_install import (
    MANIFEST,
    RECORD,
    deepspeed_of_record,
    with_libraries,
    with_manifest,
    with_tags,
)
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Cuda, DeepSpeed, Gap, JitCache, Python, Torch
from dsdoctor.core.processes import FileHolder

IMPORT_TIMEOUT_SECONDS = 120.0
CXX_STANDARD = r"__cplusplus\s*<\s*20\d\d"
TABLES = (
    r"^MINIMUM_\w+_VERSION\s*=.*$|^CUDA_(?:GCC|CLANG)_VERSIONS\b[^=\n]*=\s*\{[^}]*\}|supported_arches\s*=\s*\[[^\]]*\]"
)
"""The tables of ``cpp_extension.py`` that its checks use."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter, and the folders of the packages that other questions read.

    ``torch_lacks`` are packages that torch requires and that are not there.
    """

    python: Python
    torch: str | None = None
    torch_lacks: tuple[str, ...] = ()
    deepspeed: str | None = None
    cutlass: str | None = None


@dataclass(frozen=True, kw_only=True)
class _TorchAnswer:
    arch_list: tuple[str, ...]
    nccl: str | None = None
    capabilities: tuple[str, ...] = ()


def ask_python(host: Host, python: str) -> Environment | Gap:
    """Ask the interpreter about itself and its packages; torch is not imported."""
    return parse_answer(host.ask(python, "ask_python.py", timeout=60), Environment, f"python {python}")


def read_deepspeed(host: Host, environment: Environment | None) -> DeepSpeed | None:
    """The DeepSpeed of an environment; None when there is none."""
    if environment is None or environment.deepspeed is None:
        return None
    location = environment.deepspeed
    version = environment.python.packages.get("deepspeed") or "unknown"
    facts = deepspeed_of_record(host.read(f"{location}/{RECORD}") or "", version=version, location=location)
    if facts.installed_ops:
        facts = with_libraries(facts, host.glob(f"{glob.escape(location)}/**/*.so"))
    information = f"{glob.escape(location.rsplit('/', 1)[0])}/deepspeed-{glob.escape(version)}.dist-info"
    manifest, wheel = (
        next((host.read(path) for path in host.glob(f"{information}/{name}")), None) for name in (MANIFEST, "WHEEL")
    )
    return with_tags(with_manifest(facts, manifest, exists=host.exists), wheel)


def read_jit_cache(host: Host, environment: Environment | None, torch: Torch | None) -> JitCache | None:
    """The folder that ``torch.utils.cpp_extension.load`` would use; None without torch or without any folder to name."""
    if environment is None or torch is None:
        return None
    named = host.variable("TORCH_EXTENSIONS_DIR")
    folder = named or _default(host, environment.python.tag, torch)
    if folder is None:
        return None
    locks: dict[str, float] = {}
    holders: dict[str, FileHolder] = {}
    for lock in host.glob(f"{glob.escape(folder)}/*/lock"):
        op, age, holder = lock.rsplit("/", 2)[1], host.age(lock), host.holder(lock)
        if age is not None:
            locks[op] = age
        if holder is not None:
            holders[op] = holder
    return JitCache(
        folder=folder,
        named=bool(named),
        writable=host.writable(folder),
        ops=tuple(path.rsplit("/", 2)[1] for path in host.glob(f"{glob.escape(folder)}/*/*.so")),
        locks=locks,
        holders=holders,
    )


def ask_torch(host: Host, environment: Environment | None, whole: bool) -> Torch | Gap | None:
    """Look at the torch of an environment; one that crashes or hangs on import still has a version.

    ``whole`` imports torch as a program does (seconds). Otherwise its shared libraries are loaded and asked, without
    its Python modules, which takes a fourth of the time. Where that fails, importing torch shows why.
    """
    if environment is None or environment.torch is None:
        return None
    from_files = read_torch(host, environment.torch)
    if from_files is None:
        return Gap(question="torch", reason=f"{environment.torch}/version.py cannot be read")
    python = environment.python.executable
    answer: _TorchAnswer | Gap = Gap(question="torch", reason="not asked")
    if not whole and not environment.torch_lacks:
        answer = parse_answer(
            host.ask(python, "load_torch.py", environment.torch, timeout=IMPORT_TIMEOUT_SECONDS), _TorchAnswer, "torch"
        )
    if isinstance(answer, Gap):
        answer = parse_answer(host.ask(python, "ask_torch.py", timeout=IMPORT_TIMEOUT_SECONDS), _TorchAnswer, "torch")
    if isinstance(answer, Gap):
        return replace(from_files, broken=answer.reason)
    return replace(
        from_files,
        arch_list=tuple(capability_of(name) for name in answer.arch_list if name.startswith("sm_")),
        ptx=tuple(capability_of(name) for name in answer.arch_list if name.startswith("compute_")),
        capabilities=answer.capabilities,
        nccl=answer.nccl or _nccl_wheel(environment.python),
    )


def read_torch(host: Host, location: str) -> Torch | None:
    """What torch's files say, without running it."""
    text = host.search(f"{location}/version.py", r"^(?:__version__|cuda|hip)\b.*$")
    version = parse_assignment(text, "__version__")
    if version is None:
        return None
    cuda = Cuda.parse(parse_assignment(text, "cuda"))
    xpu = host.search(f"{location}/version.py", r"^xpu\b.*$")
    extension = host.search(f"{location}/utils/cpp_extension.py", TABLES)
    return Torch(
        version=version,
        location=location,
        cuda=cuda,
        hip=parse_assignment(text, "hip"),
        xpu=parse_assignment(xpu, "xpu"),
        cxx_standard=parse_cxx_standard(host.search(f"{location}/include/ATen/ATen.h", CXX_STANDARD)),
        cuda_home=guessed_cuda_home(host),
        known_architectures=parse_known_architectures(extension),
        gcc_bounds=parse_bounds(extension, "CUDA_GCC_VERSIONS", cuda),
        clang_bounds=parse_bounds(extension, "CUDA_CLANG_VERSIONS", cuda),
    )


def guessed_cuda_home(host: Host) -> str | None:
    """The folder that ``torch.utils.cpp_extension`` takes for CUDA_HOME now (its ``_find_cuda_home``).

    CUDA_HOME or CUDA_PATH as they are, else two folders up from the nvcc on PATH (links are not followed), else
    /usr/local/cuda when it exists.
    """
    named = host.variable("CUDA_HOME") or host.variable("CUDA_PATH")
    if named is not None:
        return named or None
    nvcc = host.which("nvcc")
    if nvcc is not None:
        return nvcc.rsplit("/", 2)[0] or "/"
    return "/usr/local/cuda" if host.glob("/usr/local/cuda") else None


def capability_of(name: str) -> str:
    """An ``sm_`` name as a compute capability.

    >>> capability_of("sm_90"), capability_of("sm_120"), capability_of("sm_90a")
    ('9.0', '12.0', '9.0a')
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)([a-z]?)", name)
    return f"{match[1]}.{match[2]}{match[3]}" if match else name


def parse_assignment(text: str, name: str) -> str | None:
    """The string that a line of ``torch/version.py`` assigns.

    >>> parse_assignment("cuda: Optional[str] = '13.0'", "cuda")
    '13.0'
    >>> parse_assignment("hip: Optional[str] = None", "hip") is None
    True
    """
    match = re.search(rf"^{name}\b[^=\n]*=\s*'([^'\n]*)'", text, re.MULTILINE)
    return match[1] if match else None


def parse_cxx_standard(header: str) -> int:
    """The C++ standard that ``ATen.h`` requires.

    >>> parse_cxx_standard("#if !defined(_MSC_VER) && __cplusplus < 202002L")
    20
    """
    match = re.search(r"__cplusplus\s*<\s*20(\d\d)", header)
    return {11: 11, 14: 14, 17: 17, 20: 20, 23: 23}.get(int(match[1]), 17) if match else 17


def parse_known_architectures(extension: str) -> tuple[str, ...]:
    """The architectures that torch's ``cpp_extension.py`` takes in TORCH_CUDA_ARCH_LIST.

    >>> parse_known_architectures("supported_arches = ['8.0', '9.0',\\n '9.0a']")
    ('8.0', '9.0', '9.0a')
    """
    listed = re.search(r"supported_arches\s*=\s*\[([^\]]*)\]", extension)
    return tuple(re.findall(r"'(\d{1,2}\.\d[a-z]?)'", listed[1])) if listed else ()


def parse_bounds(extension: str, table: str, cuda: Cuda | None) -> tuple[int, int] | None:
    """The compiler majors [least, first too new) that ``cpp_extension.py`` accepts for a CUDA release.

    >>> text = "MINIMUM_GCC_VERSION = (5, 0, 0)\\nCUDA_GCC_VERSIONS: X = {\\n '11.1': (MINIMUM_GCC_VERSION, (11, 0)),\\n}"
    >>> parse_bounds(text, "CUDA_GCC_VERSIONS", Cuda(11, 1))
    (5, 11)
    """
    found = re.search(rf"^{table}\b[^=\n]*=\s*\{{([^}}]*)\}}", extension, re.MULTILINE)
    if cuda is None or found is None:
        return None
    entry = re.search(rf"'{re.escape(str(cuda))}':\s*\(\s*(\w+|\(\d+[^)]*\)),\s*\((\d+)", found[1])
    if entry is None:
        return None
    least = re.search(rf"^{entry[1]}\s*=\s*\((\d+)", extension, re.MULTILINE) if entry[1].isidentifier() else None
    return int((least[1] if least else entry[1]).strip("(").split(",")[0]), int(entry[2])


def _default(host: Host, tag: str, torch: Torch) -> str | None:
    """The folder as torch's ``_get_build_directory`` names it: the user's cache folder, then pyXY_cuZZ."""
    home = host.variable("HOME")
    cache = host.variable("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    variant = f"cu{torch.cuda}".replace(".", "") if torch.cuda else "cpu"
    return f"{cache}/torch_extensions/{tag.replace('cp', 'py')}_{variant}" if cache else None


def _nccl_wheel(python: Python) -> str | None:
    """The release of the NCCL that torch's wheel brought."""
    return next((version for name, version in python.packages.items() if name.startswith("nvidia-nccl-")), None)
