"""Files and folders as a user names them -> the traces of one run, one a rank, and what is to be said about them."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.frame import Header
from dsdoctor.overflow.trace.trace_file import is_torn, read_header

PATTERN = "trace-rank*.jsonl"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The trace of one rank."""

    path: Path
    header: Header

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return self.header.rank


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The traces of one run in the order of their ranks. ``notes``: what a reader should know, a line each."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that there are traces of."""
        return tuple(source.rank for source in self.sources)

    def of(self, rank: int) -> Source:
        """The trace of a rank. Raises UsageError where there is none."""
        for source in self.sources:
            if source.rank == rank:
                return source
        known = ", ".join(map(str, self.ranks))
        raise UsageError(f"there is no trace of rank {rank} among these", hint=f"there are traces of rank {known}")


def sources(paths: Iterable[Path]) -> Traces:
    """The traces that files and folders hold. A file that is named twice, or in a folder as well, counts once.

    Raises UsageError for what is no trace, for two traces of one rank, and for ranks of different runs.
    """
    found: dict[Path, Source] = {}
    notes: list[str] = []
    for path, asked in _files(paths):
        if not asked and not path.stat().st_size:
            notes.append(f"{path} is empty and was left out")
        elif path.resolve() not in found:
            found[path.resolve()] = Source(path=path, header=read_header(path))
    ordered = tuple(sorted(found.values(), key=lambda source: source.rank))
    _check(ordered)
    notes += [
        f"the last line of {one.path} is torn and was left out: its job died or still runs"
        for one in ordered
        if is_torn(one.path)
    ]
    return Traces(sources=ordered, notes=tuple(notes))


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was named itself: one in a folder may be empty."""
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        inside = sorted(path.glob(PATTERN))
        if not inside:
            raise UsageError(f"{path} holds no trace ({PATTERN})", hint="name the folder that the job wrote them into")
        yield from ((one, False) for one in inside)


def _check(ordered: tuple[Source, ...]) -> None:
    if not ordered:
        raise UsageError(
            "all traces are empty: no batch was traced yet", hint="look again when the job has run a while"
        )
    for one, other in itertools.pairwise(ordered):
        if one.rank == other.rank:
            raise UsageError(
                f"{one.path} and {other.path} are both of rank {one.rank}",
                hint=f"one run has one trace a rank; two runs: dsdoctor trace compare {one.path} {other.path}",
            )
        if one.header.world != other.header.world:
            raise UsageError(
                f"{one.path} is of a run with {one.header.world} ranks, {other.path} of one with {other.header.world}",
                hint="name the traces of one run",
            )
