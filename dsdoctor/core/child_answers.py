"""A child's one-line answer -> checked data, or the reason why there is none."""

import signal
from typing import TypeVar

from dsdoctor.core.host import Answer
from dsdoctor.core.json_text import decode
from dsdoctor.core.machine import Gap

T = TypeVar("T")
MARK = "DSDOCTOR "


def parse_answer(answer: Answer, kind: type[T], question: str) -> T | Gap:
    """Read a child's answer.

    >>> parse_answer(Answer(returncode=0, stdout='noise\\nDSDOCTOR {"a": 1}'), dict, "q")
    {'a': 1}
    >>> parse_answer(Answer(returncode=-11, stderr=""), dict, "torch")
    Gap(question='torch', reason='the child process was ended by signal 11 (SIGSEGV)')
    """
    for line in reversed(answer.stdout.splitlines()):
        if line.startswith(MARK):
            from msgspec import DecodeError

            try:
                return decode(line[len(MARK) :], kind)
            except DecodeError as error:
                return Gap(question=question, reason=f"the child's answer is malformed: {error}")
    return Gap(question=question, reason=_why(answer))


def _why(answer: Answer) -> str:
    if answer.returncode is None:
        return answer.stderr or "no answer in time"
    if answer.returncode < 0:
        try:
            name = signal.Signals(-answer.returncode).name
        except ValueError:
            name = "unknown"
        return f"the child process was ended by signal {-answer.returncode} ({name})"
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"the child process ended with status {answer.returncode} and said nothing"
