"""The commands that compile and link each op: as the op's own builder gives them, and as they are run.

DeepSpeed's builders are asked, and their commands edited: without debug information (less work), for the processor that the wheel
is for, with threads for nvcc, and without the folder and the time of the compile in the object files. ``ask_compiler`` runs only
the preprocessor and the linker, in the caller's own environment: minutes instead of an hour.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dsdoctor.builder.plan.choices import JOB_MEMORY_BYTES
from dsdoctor.builder.plan.compiler import flags_of
from dsdoctor.core.build_models import BuildPlan, OpPlan, Source
from dsdoctor.core.children import MARK, PreloadedPython, parse_answer
from dsdoctor.core.host import CHILD_SCRIPTS, Answer, LocalHost
from dsdoctor.core.machine import Gap, Machine
from dsdoctor.core.redaction import Hidden
from dsdoctor.core.text import decode
from dsdoctor.rules import book

SILENCE_TIMEOUT_SECONDS = 300.0
"""Seconds without a line after which a preloaded process is given up: a builder's own probe compiles a few lines at most."""

SIMD = ("-D__AVX512__", "-D__AVX256__", "-D__SVE__", "-D__NEON__", "-D__SCALAR__")
NVCC_WITH_OBJTEMP = 12
GCC_WITHOUT_DEFINITIONS = 11
"""Since this major gcc records flags, and no longer the whole command line with its definitions."""

LINK_MEMORY_BYTES = 512 << 20
LATE_COLLECTION = ("--param=ggc-min-heapsize=1048576", "--param=ggc-min-expand=100")
"""gcc collects its garbage when 2 GiB are taken, not from 128 MiB on again and again: a sixth less work for a file that
includes torch's headers (21.2 -> 17.9 CPU-seconds, 1.5 -> 2.0 GiB, gcc 12), and the same bytes. The values are fixed, since gcc
records them: its own depend on the machine's memory."""

NATIVE = re.compile(r"-m(?:arch|cpu|tune)=native")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One compile or link command, to be run in the source tree: paths below it are relative. ``source`` is None for a link."""

    argv: tuple[str, ...]
    source: str | None
    output: str

    @property
    def by_nvcc(self) -> bool:
        """Whether nvcc runs it."""
        return (self.source or "").endswith(".cu")


@dataclass(frozen=True, kw_only=True)
class OpCommands:
    """What compiles and links one op. ``error`` is why there are no commands, ``output`` what its builder printed.

    ``forgotten`` are linker flags that the builder leaves out and that were added.
    """

    op: str
    compile: tuple[Command, ...] = ()
    link: tuple[Command, ...] = ()
    forgotten: tuple[str, ...] = ()
    error: str | None = None
    output: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Command, ...]:
        """The compile commands, then the link."""
        return (*self.compile, *self.link)


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


@dataclass(frozen=True)
class _CommandsAnswer:
    op: str
    compile: list[list[str]] = field(default_factory=list)
    link: list[list[str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a process answered, what it printed after the last answer, and how it ended."""

    answers: dict[str, OpCommands]
    output: list[str]
    status: int | None


@dataclass(frozen=True, kw_only=True)
class _OpAnswer:
    op: str
    error: str | None
    output: str | None


def ask_commands(
    host: LocalHost,
    plan: BuildPlan,
    *,
    tree: Path,
    env: Mapping[str, str],
    preloaded: PreloadedPython | None = None,
) -> dict[str, OpCommands]:
    """The commands of every op of a plan, asked in one process.

    ``preloaded`` is asked first. Where an op's builder ends a process, the remaining ops are asked in a new one; so is an op that
    has no commands in a process that was forked.
    """
    # torch would put a wrapper such as ccache in front itself; compile_ops does that
    whole = {**env, "TORCH_NO_COMPILER_WRAPPER": "1"}
    answers: dict[str, OpCommands] = {}
    if preloaded is not None:
        run = partial(preloaded.run, "ask_commands.py", folder=tree, env=whole, silence=SILENCE_TIMEOUT_SECONDS)
        asked = _ask(plan.ops, tree, lambda pairs, on_line: run(pairs, on_line=on_line))
        answers = {op: answer for op, answer in asked.answers.items() if answer.error is None}
    argv = [plan.python, str(CHILD_SCRIPTS / "ask_commands.py")]
    while rest := [op for op in plan.ops if op.op not in answers]:
        asked = _ask(
            rest, tree, lambda pairs, on_line: host.stream([*argv, pairs], cwd=tree, env=whole, on_line=on_line)
        )
        answers |= asked.answers
        unanswered = [op.op for op in rest if op.op not in answers]
        if unanswered:
            output = asked.output
            last = next((line for line in reversed(output) if line.strip()), "")
            why = first_error(output) or book.phrase("builder", "builder-ended", status=asked.status, last=last)
            answers[unanswered[0]] = OpCommands(op=unanswered[0], error=why, output=tuple(output))
    return answers


def ask_compiler(
    host: LocalHost,
    source: Source,
    ops: Iterable[str],
    *,
    python: str,
    jobs: int,
    folder: Path,
    on_op: Callable[[str, str | None], None],
) -> dict[str, str | None]:
    """The compiler's first error for each op, None for one that passes. An op that ended the asking process gets its status.

    ``folder`` is deleted afterwards; ``on_op`` is called with each verdict as it comes.
    """
    wanted = tuple(ops)
    verdicts: dict[str, str | None] = {}
    env, hidden = host.environment() | {"DS_ACCELERATOR": source.accelerator}, Hidden(host.environment())
    kind, place = ("source", source.folder) if source.folder else ("installed", source.asked)

    def on_line(line: str) -> None:
        answer = parse_answer(Answer(returncode=0, stdout=line), _OpAnswer, "op")
        if not isinstance(answer, Gap):
            why = answer.error or first_error((answer.output or "").splitlines()) or answer.output
            verdicts[answer.op] = hidden.out_of(why) if why else why
            on_op(answer.op, verdicts[answer.op])

    while rest := [op for op in wanted if op not in verdicts]:
        argv = [python, str(CHILD_SCRIPTS / "deep_ops.py"), kind, place, str(folder / "deep"), str(jobs), *rest]
        status = host.stream(argv, cwd=folder, env=env, on_line=on_line)
        unanswered = [op for op in rest if op not in verdicts]
        if unanswered:
            # the process died at this op; the others are asked in a new process
            verdicts[unanswered[0]] = book.phrase("builder", "compiler-ended", status=status)
            on_op(unanswered[0], verdicts[unanswered[0]])
    return verdicts


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


def edited(command: Command, settings: FlagSettings) -> Command:
    """The command as it will be run, except for nvcc's threads."""
    if command.source is None:
        # the files that the linker reads are inputs of the op: --trace lists them
        return replace(command, argv=(*command.argv, "-Wl,--trace"))
    edit = _for_nvcc if command.by_nvcc else _for_gcc
    return replace(command, argv=tuple(edit(command, settings)))


def changes(before: Command, after: Command) -> str:
    """What was taken out and put in, for the log: "-g -march=native -> -g0". Empty for nothing."""
    gone = [word for word in before.argv if word not in after.argv]
    new = [word for word in after.argv if word not in before.argv]
    return f"{' '.join(gone) or 'nothing'} -> {' '.join(new) or 'nothing'}" if gone or new else ""


def dependency_file(command: Command) -> str:
    """Where a compile command lists the files that it read."""
    return f"{command.output}.d"


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
        return LINK_MEMORY_BYTES
    return JOB_MEMORY_BYTES[command.by_nvcc] * threads_of(command)


def read_command(argv: list[str], tree: Path) -> Command:
    """Read a command as setuptools puts it together: the source comes before "-o", the output after it.

    >>> read_command("g++ -I/tree/csrc -I/tree -c csrc/a.cpp -o build/a.o -O3".split(), Path("/tree")).argv
    ('g++', '-Icsrc', '-I.', '-c', 'csrc/a.cpp', '-o', 'build/a.o', '-O3')
    >>> read_command("g++ -shared build/a.o -lc10 -o build/a.so".split(), Path("/tree")).source is None
    True
    """
    relative = tuple(below(word, tree) for word in argv)
    at = relative.index("-o")
    return Command(argv=relative, source=relative[at - 1] if "-c" in relative else None, output=relative[at + 1])


def below(word: str, tree: Path) -> str:
    """An argument with paths below the tree relative to it.

    >>> below("-I/tree/csrc/includes", Path("/tree")), below("/tree", Path("/tree")), below("/trees/a", Path("/tree"))
    ('-Icsrc/includes', '.', '/trees/a')
    """
    return re.sub(rf"{re.escape(os.fspath(tree))}(/+|$)", lambda found: "" if found[1] else ".", word)


def _ask(ops: Sequence[OpPlan], tree: Path, run: Callable[[str, Callable[[str], None]], int | None]) -> _Asked:
    """Ask for the commands of ops in one process, which ``run`` starts with their names and hands its lines over."""
    answers: dict[str, OpCommands] = {}
    output: list[str] = []

    def on_line(line: str) -> None:
        if line.startswith(MARK):
            answer = _read(line, tree, tuple(output))
            answers[answer.op] = answer
            output.clear()
        else:
            output.append(line)

    status = run(json.dumps([(op.op, ";".join(op.architectures)) for op in ops]), on_line)
    return _Asked(answers=answers, output=output, status=status)


def _read(line: str, tree: Path, output: tuple[str, ...]) -> OpCommands:
    answer = decode(line.removeprefix(MARK), _CommandsAnswer)
    return OpCommands(
        op=answer.op,
        compile=tuple(read_command(argv, tree) for argv in answer.compile),
        link=tuple(read_command(argv, tree) for argv in answer.link),
        forgotten=tuple(answer.forgotten),
        error=answer.error,
        output=output,
    )


def _all_gcc(plan: BuildPlan, machine: Machine, since: int = 0) -> bool:
    """Whether it is known that every compiler of the plan is gcc, of this major or a newer one."""
    named = {plan.env.get("CC"), plan.env.get("CXX")}
    used = [known for known in machine.compilers if {known.path, known.c_path} & named]
    return bool(used) and all(known.kind == "gcc" and known.major >= since for known in used)


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
    yield from _reproducible_flags(replace(settings, renamed=named))
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
    for flag in _reproducible_flags(settings):
        yield from ("-Xcompiler", flag)
    yield from ("-MD", "-MF", dependency_file(command))


def _reproducible_flags(settings: FlagSettings) -> Iterable[str]:
    """The flags that keep debug information and the folders of this machine out of an object file, and those that save time."""
    # -frecord-gcc-switches keeps gcc's flags readable in the file: without debug information they would be lost
    yield from () if settings.debug_info else ("-g0", *(("-frecord-gcc-switches",) if settings.recorded else ()))
    for folder, name in settings.renamed:
        yield f"-ffile-prefix-map={folder}={name}"
    yield from LATE_COLLECTION if settings.late_collection else ()


CAUSE = re.compile(
    r"dsdoctor: error:"
    r"|No space left on device"
    r"|Killed signal terminated program|died due to signal|ninja: fatal"
    r"|(?:fatal )?error\s*:\s*\S|: error [A-Z]?\d+"
    r"|undefined reference to|cannot find -l\S+|cannot open shared object"
    r"|nvcc fatal\s*:"
)
POSSIBLE_CAUSE = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)\b: .*|error: .*)|command not found|: not found")
REPEAT = re.compile(
    r"ninja: build stopped|subcommand failed|Error compiling objects|command .* failed with exit (code|status)"
)
MAX_ERROR_LENGTH = 300


def first_error(lines: Iterable[str]) -> str | None:
    """The first real error line, None when there is none.

    >>> first_error(["[1/2] g++ -c a.cpp", "a.cpp:1:10: fatal error: libaio.h: No such file or directory",
    ...     "ninja: build stopped: subcommand failed.", "RuntimeError: Error compiling objects for extension"])
    'a.cpp:1:10: fatal error: libaio.h: No such file or directory'
    """
    possible = None
    for line in lines:
        if REPEAT.search(line):
            continue
        if CAUSE.search(line) and not _is_command(line):
            return line.strip()[:MAX_ERROR_LENGTH]
        if possible is None and POSSIBLE_CAUSE.search(line):
            possible = line.strip()[:MAX_ERROR_LENGTH]
    return possible


def _is_command(line: str) -> bool:
    return re.match(r"\s*(\[\d+/\d+\] )?\S*(c\+\+|g\+\+|gcc|cc|nvcc|clang)\S* -", line) is not None
