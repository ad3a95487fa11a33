"""BuildPlan + source tree -> the commands that compile each op, as the op's own builder gives them. Runs none of them."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dsdoctor.builder.make.first_error import first_error
from dsdoctor.core.build_models import BuildPlan, OpPlan
from dsdoctor.core.children import MARK, PreloadedPython
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.core.text import decode

SILENCE = 300.0
"""Seconds without a line after which a preloaded process is given up: a builder's own probe compiles a few lines at most."""


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


@dataclass(frozen=True)
class _CommandsAnswer:
    op: str
    compile: list[list[str]] = field(default_factory=list)
    link: list[list[str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    error: str | None = None


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
        run = partial(preloaded.run, "ask_commands.py", folder=tree, env=whole, silence=SILENCE)
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
            last = next((line for line in reversed(output) if line.strip()), "it printed nothing")
            why = first_error(output) or f"asking its builder ended with status {asked.status}: {last}"
            answers[unanswered[0]] = OpCommands(op=unanswered[0], error=why, output=tuple(output))
    return answers


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a process answered, what it printed after the last answer, and how it ended."""

    answers: dict[str, OpCommands]
    output: list[str]
    status: int | None


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
