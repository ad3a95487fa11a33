"""Ops -> the compiler's first error for each, found by running only the preprocessor and the linker: minutes instead of an hour.

Works in a temporary folder, with the caller's own environment, so it meets what pip or the run-time loader would meet.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.make.first_error import first_error
from dsdoctor.core.build_models import Source
from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import CHILD_SCRIPTS, Answer, LocalHost
from dsdoctor.core.machine import Gap
from dsdoctor.core.redaction import Hidden


@dataclass(frozen=True, kw_only=True)
class _OpAnswer:
    op: str
    error: str | None
    output: str | None


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
            verdicts[unanswered[0]] = f"asking the compiler ended with status {status}"
            on_op(unanswered[0], verdicts[unanswered[0]])
    return verdicts
