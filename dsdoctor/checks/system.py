"""Machine -> findings about the system: search paths, variables, libraries, memory, disk, torch's cache of ops."""

from collections.abc import Iterator

from packaging.version import Version

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine
from dsdoctor.core.processes import SEGMENT, FileHolder, Leftover
from dsdoctor.core.text import and_more, nearest
from dsdoctor.rules import book

STALE_AFTER = 600.0
LOCKS_RELEASED_SINCE = Version("2.14")
"""From this torch on the operating system holds the lock, so a file that is left behind blocks nobody."""


def jit_cache_shared(machine: Machine) -> Iterator[Finding]:
    """TORCH_EXTENSIONS_DIR names the cache of ops compiled at run time, so all environments share one folder."""
    jit = machine.jit
    if jit and jit.named and jit.ops:
        yield book.finding("jit-cache-shared", Severity.NOTE, folder=jit.folder, ops=jit.ops[:6])


def stale_jit_cache(machine: Machine) -> Iterator[Finding]:
    """A lock file was left behind in the cache of ops compiled at run time."""
    jit, torch = machine.jit, machine.torch
    if not jit or not torch or _at_least(torch.minor, LOCKS_RELEASED_SINCE):
        return
    takes = f"torch {torch.version} uses a lock file while it compiles"
    for op, age in sorted(jit.locks.items()):
        holder, path = jit.holders.get(op, FileHolder()), f"{jit.folder}/{op}/lock"
        if holder.pid is None and not holder.doubt:
            yield book.finding(
                "stale-jit-cache",
                Severity.ERROR,
                case="not-held",
                evidence=[takes],
                affects=(op,),
                lock=path,
                op=op,
                minutes=f"{age / 60:.0f}",
            )
        elif holder.pid is None and age > STALE_AFTER:
            yield book.finding(
                "stale-jit-cache",
                Severity.WARNING,
                evidence=[takes, f"its holder is unknown: {holder.doubt}"],
                affects=(op,),
                lock=path,
                op=op,
                minutes=f"{age / 60:.0f}",
            )


def torch_extensions_permission(machine: Machine) -> Iterator[Finding]:
    """The cache of ops compiled at run time cannot be written by this user."""
    jit = machine.jit
    if jit and not jit.writable:
        yield book.finding("torch-extensions-permission", Severity.WARNING, folder=jit.folder)


def _at_least(version: str, least: Version) -> bool:
    try:
        return Version(version) >= least
    except ValueError:
        return False


GIB, MIB = 1 << 30, 1 << 20
KNOWN_VARIABLES = (
    *("DS_ACCELERATOR", "DS_BUILD_OPS", "DS_BUILD_STRING", "DS_ENABLE_NINJA", "DS_SKIP_CUDA_CHECK"),
    *("DS_IGNORE_CUDA_DETECTION", "DS_NVCC_THREADS", "DS_DEBUG_CUDA_BUILD", "DS_EVOFORMER_GPU_ARCH"),
)
MIN_LIKENESS = 0.85
"""Of a variable to one of DeepSpeed's."""
MIN_SHARED_MEMORY_BYTES = 1 * GIB
"""NCCL and data loaders take hundreds of MiB of /dev/shm a rank; docker's default is 64 MiB."""
MAX_JOB_BYTES = {True: 7 * GIB // 2, False: 2 * GIB}
"""The most bytes that a compile job takes, with and without GPU code (measured for build-wheel)."""
SHARED_MEMORY_FOLDER = "/dev/shm/"
MIN_LEFTOVER_SHARE = 0.1
"""Of /dev/shm: below it leftovers do not matter."""
MAX_FILES = 64
"""Segments that one command names."""
MAX_LINES = 6


def summary(machine: Machine) -> str:
    """One line for the topic."""
    system = machine.system
    memory = f"{system.memory / GIB:.0f} GiB" if system.memory else "unknown memory"
    return f"System: {system.os}, {system.cpus} processors, {memory}" + (
        f", {system.container}" if system.container else ""
    )


def not_asked(machine: Machine) -> Iterator[Finding]:
    """A question about this machine could not be answered."""
    own_checks = ("python", "torch", "gpus", "cache")  # they have rules of their own
    for gap in machine.gaps:
        if not gap.question.startswith(own_checks):
            yield book.finding("not-asked", Severity.NOTE, case="unanswered", question=gap.question, reason=gap.reason)


def cache_not_trusted(machine: Machine) -> Iterator[Finding]:
    """Others may write to dsdoctor's cache folder, to one of its parents, or it belongs to somebody else."""
    for gap in machine.gaps:
        if gap.question == "cache":
            yield book.finding("cache-not-trusted", Severity.WARNING, reason=gap.reason)


def path_entry_missing(machine: Machine) -> Iterator[Finding]:
    """PATH names folders that do not exist."""
    missing = machine.paths.missing_path
    if missing:
        yield book.finding(
            "path-entry-missing",
            Severity.NOTE,
            case="several",
            folders=and_more(missing, 4),
        )


def library_path_entry_missing(machine: Machine) -> Iterator[Finding]:
    """LD_LIBRARY_PATH names folders that do not exist."""
    missing = machine.paths.missing_library_path
    if missing:
        yield book.finding(
            "library-path-entry-missing",
            Severity.NOTE,
            folders=and_more(missing, 4),
        )


def library_path_other_cuda(machine: Machine) -> Iterator[Finding]:
    """LD_LIBRARY_PATH puts the libraries of another CUDA major before those that torch was built with."""
    torch, runtimes = machine.torch, machine.paths.runtimes
    if not torch or not torch.cuda or not runtimes or runtimes[0].major == torch.cuda.major:
        return
    first = runtimes[0]
    yield book.finding(
        "library-path-other-cuda",
        Severity.WARNING,
        evidence=[f"{runtime.folder}: libcudart.so.{runtime.major}" for runtime in runtimes],
        major=first.major,
        folder=first.folder,
        torch=str(torch.cuda),
    )


def libaio_missing(machine: Machine) -> Iterator[Finding]:
    """libaio's header or library is missing."""
    library = machine.library("libaio")
    if library is None or not library.usable:
        yield book.finding(
            "libaio-missing",
            Severity.WARNING,
            case="header" if library else "",
            affects=("libaio",),
            library=library.library if library else "",
        )


def ds_variables_set(machine: Machine) -> Iterator[Finding]:
    """Variables that steer DeepSpeed's build are set in this shell."""
    here = {
        name: value for name, value in machine.variables.items() if name in KNOWN_VARIABLES or _is_build_variable(name)
    }
    if here:
        yield book.finding(
            "ds-variables-set",
            Severity.NOTE,
            case="listed",
            variables=[f"{name}={value}" for name, value in here.items()],
        )


def variable_misspelt(machine: Machine) -> Iterator[Finding]:
    """A variable looks like one of DeepSpeed's and is not one."""
    for name in machine.ds_names:
        if name.startswith("DS_") and not _is_build_variable(name) and name not in KNOWN_VARIABLES:
            known = nearest(name, KNOWN_VARIABLES, min_likeness=MIN_LIKENESS)
            if known is not None:
                yield book.finding("variable-misspelt", Severity.WARNING, variable=name, known=known)


def variable_malformed(machine: Machine) -> Iterator[Finding]:
    """A DS_BUILD_* variable does not hold a number."""
    for name, value in machine.variables.items():
        if _is_build_variable(name) and name != "DS_BUILD_STRING" and value and not _is_number(value):
            yield book.finding("variable-malformed", Severity.ERROR, variable=name, value=repr(value))


def nccl_shm_too_small(machine: Machine) -> Iterator[Finding]:
    """/dev/shm is small."""
    size, shared = machine.system.shared_memory, machine.shared_memory
    left = sum(each.size for each in shared.leftovers) if shared else 0  # of which there is a rule of its own
    if size is not None and size + left < MIN_SHARED_MEMORY_BYTES:
        yield book.finding(
            "nccl-shm-too-small", Severity.WARNING if machine.gpus else Severity.NOTE, free=f"{size / MIB:.0f} MiB"
        )


def compiler_oom_killed(machine: Machine) -> Iterator[Finding]:
    """The memory is less than the compile jobs would take together, as the control group limits it."""
    system = machine.system
    named = machine.variables.get("MAX_JOBS", "")
    jobs = int(named) if named.isdecimal() and len(named) < 5 else system.cpus + 2
    each = MAX_JOB_BYTES[machine.torch is not None and machine.torch.cuda is not None]
    if machine.torch and system.memory and jobs > 1 and jobs * each > system.memory:
        yield book.finding(
            "compiler-oom-killed",
            Severity.NOTE,
            evidence=[f"MAX_JOBS={named}" if named else f"{system.cpus} processors: ninja starts {jobs} jobs"],
            jobs=jobs,
            needed=f"{jobs * each / GIB:.0f} GiB",
            memory=f"{system.memory / GIB:.0f} GiB",
            limit=max(1, system.memory // each),
        )


def disk_full(machine: Machine) -> Iterator[Finding]:
    """The disk of dsdoctor's cache folder has little room."""
    free = machine.system.cache_free
    if free is not None and free < GIB:
        yield book.finding("disk-full", Severity.WARNING, free=f"{free / MIB:.0f} MiB")


def shared_memory_left_over(machine: Machine) -> Iterator[Finding]:
    """Runs that were killed left segments in /dev/shm, and these take a tenth of it or more."""
    shared = machine.shared_memory
    left = tuple(each for each in shared.leftovers if _is_segment(each.path)) if shared else ()
    taken = sum(each.size for each in left)
    if shared is None or taken == 0 or taken < MIN_LEFTOVER_SHARE * shared.total:
        return
    sure = tuple(each for each in left if not each.doubt)
    shown = sure or left
    files = [each.path for each in shown[:MAX_FILES]]
    yield book.finding(
        "shared-memory-left-over",
        Severity.WARNING,
        case="" if sure else "unseen",
        evidence=(
            *map(_line, shown[:MAX_LINES]),
            *([f"and {len(shown) - MAX_LINES} more"] if len(shown) > MAX_LINES else []),
            *_unseen(left, len(left) - len(sure)),
        ),
        segments=f"{len(left)} segment{'s' * (len(left) > 1)}",
        taken=f"{taken / MIB:.0f}",
        total=f"{shared.total / MIB:.0f} MiB",
        files=files,
    )


def _is_number(text: str) -> bool:
    """What Python's int() takes, which is how setup.py reads it."""
    try:
        int(text)
    except ValueError:
        return False
    return True


def _is_build_variable(name: str) -> bool:
    return name.startswith("DS_BUILD_")


def _is_segment(path: str) -> bool:
    """The paths may be those of another machine's snapshot, and nothing but a segment may be deleted."""
    return (
        path.startswith(SHARED_MEMORY_FOLDER) and SEGMENT.fullmatch(path.removeprefix(SHARED_MEMORY_FOLDER)) is not None
    )


def _line(each: Leftover) -> str:
    age = f"{each.age / 3600:.0f} hours" if each.age >= 2 * 3600 else f"{each.age / 60:.0f} minutes"
    return f"{each.path}: {each.size / MIB:.0f} MiB, {age} old"


def _unseen(left: tuple[Leftover, ...], count: int) -> Iterator[str]:
    if count:
        doubts = "; ".join(dict.fromkeys(each.doubt for each in left if each.doubt))
        yield f"cannot tell whether a process uses {count} of them: {doubts}"


CHECKS = (
    not_asked,
    cache_not_trusted,
    path_entry_missing,
    library_path_entry_missing,
    library_path_other_cuda,
    libaio_missing,
    ds_variables_set,
    variable_misspelt,
    variable_malformed,
    nccl_shm_too_small,
    compiler_oom_killed,
    disk_full,
    shared_memory_left_over,
    jit_cache_shared,
    stale_jit_cache,
    torch_extensions_permission,
)
