"""A Host whose answers may be written down: variables as ``redaction`` shows them, and no error that quotes the rest of them.

Whoever only looks asks through this, so that nothing else ever gets into a Machine or a snapshot. A command still runs in the
whole environment. It stands apart from ``snapshot``, which a check without a snapshot need not import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsdoctor.core.host import Answer, Host, LocalHost
from dsdoctor.core.processes import FileHolder, SharedMemory
from dsdoctor.core.redaction import Hidden, variable


class DiscreetHost:
    """Passes every question on to another Host. What a command that succeeded answers is whole, what it complains of is not."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # not asked as a question: a Recorder would write it down
        self._hidden = Hidden(host.environment() if isinstance(host, LocalHost) else {})

    def variable(self, name: str) -> str | None:
        value = self._host.variable(name)
        return None if value is None else variable(name, value)

    def variables(self, prefix: str) -> dict[str, str]:
        return {name: variable(name, value) for name, value in self._host.variables(prefix).items()}

    def names(self, prefix: str) -> tuple[str, ...]:
        return self._host.names(prefix)

    def read(self, path: str) -> str | None:
        return self._host.read(path)

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        return self._host.search(path, pattern, most=most)

    def glob(self, pattern: str) -> tuple[str, ...]:
        return self._host.glob(pattern)

    def exists(self, path: str) -> bool:
        return self._host.exists(path)

    def age(self, path: str) -> float | None:
        return self._host.age(path)

    def holder(self, path: str) -> FileHolder | None:
        return self._host.holder(path)

    def shared_memory(self, folder: str) -> SharedMemory | None:
        return self._host.shared_memory(folder)

    def writable(self, path: str) -> bool:
        return self._host.writable(path)

    def which(self, name: str) -> str | None:
        return self._host.which(name)

    def resolve(self, path: str) -> str:
        return self._host.resolve(path)

    def free(self, path: str) -> int | None:
        return self._host.free(path)

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        return self._host.distrust(path, inside, existing=existing)

    def cpus(self) -> int:
        return self._host.cpus()

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        return self._discreet(self._host.run(argv, timeout=timeout, env=env))

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        return self._discreet(self._host.ask(python, script, *arguments, timeout=timeout))

    def stop(self) -> None:
        self._host.stop()

    def _discreet(self, answer: Answer) -> Answer:
        # the answer itself is facts, which must not change where they happen to hold a word of somebody's flags
        stdout = answer.stdout if answer.ok else self._hidden.out_of(answer.stdout)
        return replace(answer, stdout=stdout, stderr=self._hidden.out_of(answer.stderr))
