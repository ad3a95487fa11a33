"""Child scripts: one process that has torch already, and the checked answer of each.

Importing torch takes seconds, and a build asks it three times: a process imports torch before it is known what it will be asked,
and then runs child scripts in forks of itself. Nothing rests on this process: where it cannot answer, or a script fails in it, the
caller asks in a new one.
"""

import contextlib
import json
import os
import queue
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from dsdoctor.core.host import CHILD_SCRIPTS, Answer, LocalHost
from dsdoctor.core.machine import Gap
from dsdoctor.core.text import decode

T = TypeVar("T")
MARK = "DSDOCTOR "
ENDED = "DSDOCTOR-ENDED "
AT_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
"""Variables that count when an interpreter starts: a process that has begun without them cannot take them over."""


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
    return lines[-1].strip() if lines else f"the child process exited with status {answer.returncode} and no output"


class PreloadedPython:
    """``python`` with torch imported, from ``start`` on. A context manager: leaving it ends the process and what it runs."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._host = LocalHost()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._writing: int | None = None

    def __enter__(self) -> "PreloadedPython":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._worker.shutdown()

    def start(self) -> None:
        """Begin to import torch."""
        if self._writing is None:
            reading, self._writing = os.pipe()
            self._worker.submit(self._live, reading)

    def run(
        self,
        script: str,
        *arguments: str,
        folder: Path,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        silence: float | None = None,
    ) -> int | None:
        """Run a child script, and hand over each line that it prints. Its exit status, negative for a signal.

        ``env`` is the whole environment. None where it was not run to its end here: the process was never started or has died,
        ``env`` has variables that only a new interpreter takes, or no line came for ``silence`` seconds.
        """
        if self._writing is None or not self._may_run_in(env):
            return None
        asked = {"script": script, "arguments": arguments, "folder": str(folder), "env": dict(env)}
        # it died, or it is silent: the caller is told by None
        with contextlib.suppress(OSError, queue.Empty):
            os.write(self._writing, json.dumps(asked).encode() + b"\n")
            while (line := self._lines.get(timeout=silence)) is not None:
                if line.startswith(ENDED):
                    return int(line.removeprefix(ENDED))
                on_line(line)
        self._end()
        return None

    def _live(self, reading: int) -> None:
        argv = [self._python, str(CHILD_SCRIPTS / "preloaded.py")]
        env = self._host.environment()
        try:
            # one that cannot be started answers nothing
            with contextlib.suppress(OSError):
                self._host.work(argv, cwd=Path.cwd(), env=env, on_line=self._hear, stdin=reading)
        finally:
            os.close(reading)
            self._lines.put(None)

    def _hear(self, line: str) -> None:
        self._lines.put(line)

    def _may_run_in(self, env: Mapping[str, str]) -> bool:
        own = self._host.environment()
        return all(own.get(name) == env.get(name) for name in {*own, *env} if name.startswith(AT_START))

    def _end(self) -> None:
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        self._host.stop()
