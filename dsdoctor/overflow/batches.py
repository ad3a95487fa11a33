"""Where the batches stand in a trace: one pass finds them, then each is read by itself, in any order and in flat memory."""

from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.overflow.frames.frame import Frame
from dsdoctor.overflow.trace.trace_file import FRAME_OF, decoded, read_header

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The byte ranges of each batch's frames. Batches of a pipeline interleave: one may have several ranges."""

    path: Path
    spans: dict[int, list[Span]] = field(default_factory=dict)

    def frames(self, batch: int) -> tuple[Frame, ...]:
        """The frames of one batch, in the order they were written. None: this trace has no such batch."""
        found: list[Frame] = []
        with self.path.open("rb") as file:
            for start, end in self.spans.get(batch, ()):
                file.seek(start)
                lines = (decoded(self.path, raw) for raw in file.read(end - start).splitlines())
                found += [line for line in lines if isinstance(line, Frame)]
        return tuple(found)


def find_batches(path: Path) -> Batches:
    """Find the batches of a trace. Frames are told by how their line begins; nothing else is decoded."""
    read_header(path)
    spans: dict[int, list[Span]] = {}
    place = 0
    with path.open("rb") as file:
        for raw in file:
            found = FRAME_OF.match(raw) if raw.endswith(b"\n") else None
            if found:
                _extend(spans.setdefault(int(found[1]), []), place, place + len(raw))
            place += len(raw)
    return Batches(path=path, spans=spans)


def _extend(spans: list[Span], start: int, end: int) -> None:
    """Add a range; one that follows the last makes it longer."""
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))
