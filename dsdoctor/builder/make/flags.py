"""The commands that DeepSpeed's builders give -> the commands that are run, and what was changed. Pure.

Leaves out debug information (less work), compiles for the processor that the wheel is for, gives nvcc threads, and keeps the folder
and the time of the compile out of the object files.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.make.commands import Command
from dsdoctor.builder.plan.choices import JOB_MEMORY
from dsdoctor.builder.plan.processor import flags_of
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.machine import Machine

SIMD = ("-D__AVX512__", "-D__AVX256__", "-D__SVE__", "-D__NEON__", "-D__SCALAR__")
NVCC_WITH_OBJTEMP = 12
GCC_WITHOUT_DEFINITIONS = 11
"""Since this major gcc records flags, and no longer the whole command line with its definitions."""
LINK_MEMORY = 512 << 20
LATE_COLLECTION = ("--param=ggc-min-heapsize=1048576", "--param=ggc-min-expand=100")
"""gcc collects its garbage when 2 GiB are taken, not from 128 MiB on again and again: a sixth less work for a file that
includes torch's headers (21.2 -> 17.9 CPU-seconds, 1.5 -> 2.0 GiB, gcc 12), and the same bytes. The values are fixed, since gcc
records them: its own depend on the machine's memory."""
NATIVE = re.compile(r"-m(?:arch|cpu|tune)=native")


@dataclass(frozen=True, kw_only=True)
class FlagSettings:
    """How the commands are to be changed.

    ``host`` replaces the builder's own -march and SIMD macro (empty: they stay); ``renamed`` are folders and the name that is
    written for each in object files; ``own_temporaries`` makes nvcc name its temporary files after the object. ``recorded``
    keeps gcc's flags readable in the object files. ``late_collection`` gives gcc memory for time.
    """

    host: tuple[str, ...] = ()
    debug_info: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    own_temporaries: bool = False
    recorded: bool = True
    late_collection: bool = False


def flag_settings(plan: BuildPlan, machine: Machine, tree: Path, *, secret_flags: bool = False) -> FlagSettings:
    """How the commands of a plan's ops are to be changed; ``tree`` is the folder that they run in.

    ``secret_flags``: the shell's flags hold what nobody needs to know.
    """
    toolkit, torch, python = plan.toolkit, machine.torch, machine.python
    renamed = [(toolkit.root, "cuda")] if toolkit else []
    renamed += [(torch.location, "torch")] if torch else []
    renamed += [(python.include, "python")] if python else []
    # only debug information holds the folder of a compile
    renamed += [(str(tree), ".")] if plan.debug_info else []
    return FlagSettings(
        host=flags_of(plan.processor),
        debug_info=plan.debug_info,
        # an empty folder would rename every path
        renamed=tuple((folder, name) for folder, name in renamed if folder),
        own_temporaries=toolkit is not None and toolkit.release.major >= NVCC_WITH_OBJTEMP,
        recorded=not secret_flags or _all_gcc(plan, machine, since=GCC_WITHOUT_DEFINITIONS),
        late_collection=_all_gcc(plan, machine),
    )


def _all_gcc(plan: BuildPlan, machine: Machine, since: int = 0) -> bool:
    """Whether it is known that every compiler of the plan is gcc, of this major or a newer one."""
    named = {plan.env.get("CC"), plan.env.get("CXX")}
    used = [known for known in machine.compilers if {known.path, known.c_path} & named]
    return bool(used) and all(known.kind == "gcc" and known.major >= since for known in used)


def threaded(command: Command, threads: int) -> Command:
    """nvcc's command with that many threads; any other command as it is."""
    several = command.by_nvcc and threads > 1
    return replace(command, argv=(*command.argv, f"--threads={threads}")) if several else command


def threads_of(command: Command) -> int:
    """The threads of a compile command; only nvcc can have more than one."""
    return next((int(word.partition("=")[2]) for word in command.argv if word.startswith("--threads=")), 1)


def memory_of(command: Command) -> int:
    """Bytes that a command takes at the most."""
    if command.source is None:
        return LINK_MEMORY
    return JOB_MEMORY[command.by_nvcc] * threads_of(command)


def edited(command: Command, settings: FlagSettings) -> Command:
    """The command as it will be run, except for nvcc's threads."""
    if command.source is None:
        # the files that the linker reads are inputs of the op: --trace lists them
        return replace(command, argv=(*command.argv, "-Wl,--trace"))
    edit = _for_nvcc if command.by_nvcc else _for_gcc
    return replace(command, argv=tuple(edit(command, settings)))


def dependency_file(command: Command) -> str:
    """Where a compile command lists the files that it read."""
    return f"{command.output}.d"


def changes(before: Command, after: Command) -> str:
    """What was taken out and put in, for the log: "-g -march=native -> -g0". Empty for nothing."""
    gone = [word for word in before.argv if word not in after.argv]
    new = [word for word in after.argv if word not in before.argv]
    return f"{' '.join(gone) or 'nothing'} -> {' '.join(new) or 'nothing'}" if gone or new else ""


def _for_gcc(command: Command, settings: FlagSettings) -> Iterable[str]:
    march, simd = settings.host or (None, None)
    for word in command.argv:
        if word == "-g" and not settings.debug_info:
            continue
        if march and NATIVE.search(word):
            yield NATIVE.sub(march, word)
        elif simd and word in SIMD:
            yield simd
        else:
            yield word
    # a folder that no word names is not in the file: without its rename the op is the same whatever stands beside it
    named = tuple(pair for pair in settings.renamed if any(pair[0] in word for word in command.argv))
    yield from _quiet(replace(settings, renamed=named))
    yield from ("-MD", "-MF", dependency_file(command))


def _for_nvcc(command: Command, settings: FlagSettings) -> Iterable[str]:
    # -lineinfo is debug information, and puts folders and the times of headers into the file
    for word in command.argv:
        if word.startswith("--threads") or (word == "-lineinfo" and not settings.debug_info):
            continue
        yield NATIVE.sub(settings.host[0], word) if settings.host else word
    # without it the name of nvcc's temporary file, which holds a process id, gets into the object
    if settings.own_temporaries:
        yield "-objtemp"
    for flag in _quiet(settings):
        yield from ("-Xcompiler", flag)
    yield from ("-MD", "-MF", dependency_file(command))


def _quiet(settings: FlagSettings) -> Iterable[str]:
    """The flags that keep debug information and the folders of this machine out of an object file, and those that save time."""
    # -frecord-gcc-switches keeps gcc's flags readable in the file: without debug information they would be lost
    yield from () if settings.debug_info else ("-g0", *(("-frecord-gcc-switches",) if settings.recorded else ()))
    for folder, name in settings.renamed:
        yield f"-ffile-prefix-map={folder}={name}"
    yield from LATE_COLLECTION if settings.late_collection else ()
