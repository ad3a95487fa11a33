"""The commands that DeepSpeed's builders give -> the commands that are run, and what was changed. Pure.

Less work (no debug information), the processor that the wheel is for, nvcc's threads, and nothing in the files that tells
of the folder or the hour they were compiled in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dsdoctor.builder.choices import JOB_MEMORY
from dsdoctor.builder.commands import Command
from dsdoctor.builder.nouns import BuildPlan, OpPlan
from dsdoctor.builder.processor import flags_of

SIMD = ("-D__AVX512__", "-D__AVX256__", "-D__SVE__", "-D__NEON__", "-D__SCALAR__")
NVCC_WITH_JOBSERVER = 13
LINK_MEMORY = 512 << 20
NATIVE = ("-march=native", "-mcpu=native", "-mtune=native")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How to compile. ``host`` takes the place of the builder's own -march and SIMD macro (none: as they are); ``renamed`` are
    folders and what stands for each in a file; ``threads`` are nvcc's, which it takes from the job server."""

    host: tuple[str, ...] = ()
    debug_info: bool = False
    renamed: Mapping[str, str] | None = None
    threads: int = 1


def orders_of(plan: BuildPlan, op: OpPlan, jobs: int) -> Orders:
    """How the commands of an op are to be edited, where ``jobs`` run at a time."""
    shares = plan.toolkit is not None and plan.toolkit.release.major >= NVCC_WITH_JOBSERVER
    return Orders(
        host=flags_of(plan.processor),
        debug_info=plan.debug_info,
        threads=min(len(op.architectures), jobs) if shares else 1,
    )


def memory_of(command: Command) -> int:
    """Bytes that a command takes at the most."""
    if command.source is None:
        return LINK_MEMORY
    threads = next((int(word.partition("=")[2]) for word in command.argv if word.startswith("--threads=")), 1)
    return JOB_MEMORY[command.by_nvcc] * (threads if command.by_nvcc else 1)


def edited(command: Command, orders: Orders) -> Command:
    """The command as it is run."""
    if command.source is None:
        # what the linker read belongs to what an op was made from
        return replace(command, argv=(*command.argv, "-Wl,--trace"))
    edit = _for_nvcc if command.by_nvcc else _for_gcc
    return replace(command, argv=tuple(edit(command, orders)))


def dependency_file(command: Command) -> str:
    """Where a compile command lists the files that it read."""
    return f"{command.output}.d"


def changes(before: Command, after: Command) -> str:
    """What was taken out and put in, for the log: "-g -march=native -> -g0". Empty for nothing."""
    gone = [word for word in before.argv if word not in after.argv]
    new = [word for word in after.argv if word not in before.argv]
    return f"{' '.join(gone) or 'nothing'} -> {' '.join(new) or 'nothing'}" if gone or new else ""


def _for_gcc(command: Command, orders: Orders) -> Iterable[str]:
    march, simd = orders.host or (None, None)
    for word in command.argv:
        if word == "-g" and not orders.debug_info:
            continue
        if march and word in NATIVE:
            yield march
        elif simd and word in SIMD:
            yield simd
        else:
            yield word
    # what gcc was told stays readable in the file, also without debug information
    yield from () if orders.debug_info else ("-g0", "-frecord-gcc-switches")
    yield from _same_everywhere(command, orders)
    yield from ("-MD", "-MF", dependency_file(command))


def _for_nvcc(command: Command, orders: Orders) -> Iterable[str]:
    words = (word for word in command.argv if not word.startswith("--threads"))
    yield from words
    if orders.threads > 1:
        yield from (f"--threads={orders.threads}", "--jobserver")
    for flag in _same_everywhere(command, orders):
        yield from ("-Xcompiler", flag)
    yield from ("-MD", "-MF", dependency_file(command))


def _same_everywhere(command: Command, orders: Orders) -> Iterable[str]:
    """What keeps folders and random names out of a file."""
    for old, new in (orders.renamed or {}).items():
        yield f"-ffile-prefix-map={old}={new}"
    yield f"-frandom-seed={command.output}"
