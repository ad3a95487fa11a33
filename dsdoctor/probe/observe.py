"""What the commands look at: this machine, or a snapshot of one. Light: check imports what judges while the machine answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine, Node
from dsdoctor.core.requests import BuildOrder
from dsdoctor.core.workspace import cache_folder
from dsdoctor.probe import Probing, probe

if TYPE_CHECKING:
    from types import TracebackType

    from dsdoctor.core.snapshot import Snapshot


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A machine that was looked at. ``snapshot`` is None for this one; ``cache`` is dsdoctor's cache folder there."""

    machine: Machine
    cache: str
    snapshot: Snapshot | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.snapshot is None


class Probe:
    """A machine that is being looked at, once. ``early`` is there soon, without what loading torch tells; ``final`` is all of it.

    A context manager: leaving it by an exception, or after ``stop``, ends what is still being asked.
    """

    def __init__(self, python: str, file: Path | None = None, *, whole: bool, toolkit: str = "") -> None:
        """``file`` is a snapshot that stands in for this machine; ``whole`` imports torch; ``toolkit`` is one more to look at.

        Raises UsageError for a file that is no snapshot.
        """
        self._recorded = _recorded(file, toolkit) if file else None
        self._host = LocalHost()
        self._cache = str(cache_folder(self._host))
        self._probing = Probing(self._host, python=python, cache=self._cache, toolkit=toolkit, whole=whole)

    def __enter__(self) -> Probe:
        if self._recorded is None:
            self._probing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorded is None:
            self._probing.__exit__(kind, error, trace)

    def early(self) -> Observation:
        """The machine as its files and tools tell."""
        return self._recorded or Observation(machine=self._probing.early(), cache=self._host.resolve(self._cache))

    def final(self) -> Observation:
        """The machine with what loading torch shows."""
        return self._recorded or Observation(machine=self._probing.final(), cache=self._host.resolve(self._cache))

    def stop(self) -> None:
        """Nobody waits for the rest."""
        self._host.stop()


def observe(python: str, file: Path | None, *, whole: bool, toolkit: str = "") -> Observation:
    """Look at this machine, or at the snapshot in a file, to the end. Raises UsageError for a file that is none."""
    with Probe(python, file, whole=whole, toolkit=toolkit) as observing:
        return observing.final()


def probe_for_build(order: BuildOrder) -> Probe:
    """Begin to look at all that a build goes by."""
    named = order.request.toolkit if order.request.toolkit not in {"auto", "pypi"} else ""
    return Probe(order.python, order.machine, whole=True, toolkit=named)


def _recorded(file: Path, toolkit: str) -> Observation:
    from dsdoctor.core.snapshot import RecordedHost

    host = RecordedHost.load(file)
    snapshot = host.snapshot
    if not snapshot.answers:
        # {} for one: every check would say that nothing is there
        raise UsageError(f"{file}: it contains no machine", hint="dsdoctor machine record FILE writes a snapshot")
    machine = probe(host, python=snapshot.python, cache=snapshot.cache, toolkit=toolkit, whole=True)
    return Observation(machine=machine, cache=snapshot.cache, snapshot=snapshot)


def read_nodes(files: Sequence[Path]) -> tuple[Node, ...]:
    """The machines in snapshots, by their files' names. Raises UsageError for a file that is none."""
    stems = [file.stem for file in files]
    return tuple(
        _node(observe("", file, whole=True).machine, file.stem if stems.count(file.stem) == 1 else str(file))
        for file in dict.fromkeys(files)
    )


def _node(machine: Machine, name: str) -> Node:
    by_torch = machine.torch.capabilities if machine.torch else ()
    capabilities = sorted({*by_torch, *(gpu.capability for gpu in machine.gpus)})
    return Node(name=name, system=machine.system, capabilities=tuple(capabilities))
