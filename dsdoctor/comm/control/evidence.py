"""What a rank that is stuck or died has written (log, stacks, flight recorder) -> rank 0's folder, over the board.

A rank puts the ends of its files on the board before it answers; rank 0 takes those of the ranks that matter, as far as their files
are not in its own folder anyway.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dsdoctor.comm.launch.evidence_files import LARGEST, write_files
from dsdoctor.comm.rendezvous.board import Board
from dsdoctor.ranks.flight_recorder import flight_file

ALL_RANKS = 1 << 24
"""Bytes of all ranks together: rank 0's store holds them in memory."""
MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The ends of a rank's files, "" where there is none, by what the names of the files end in."""

    host: str
    files: dict[str, str]


def put_evidence(board: Board, rank: int, world: int, host: str, folder: str, process: int) -> None:
    """Write what this rank has to the board. ``process`` is its data process."""
    most, here = min(LARGEST, ALL_RANKS // world), Path(folder)
    nccl = next(iter(sorted(here.glob(f"nccl.*.{process}.log"))), here / "none")
    files = {
        "log": here / f"rank-{rank:05d}.log",
        "stack.txt": here / f"stack-{process}.txt",
        "flight.json": flight_file(folder, process),
        "nccl.log": nccl,
    }
    ends = {ending: _end(path, most) for ending, path in files.items()}
    board.put(f"evidence/{rank}", Evidence(host=host, files=ends))


def take_evidence(board: Board, ranks: Iterable[int], folder: str, host: str) -> tuple[str, ...]:
    """Write what these ranks have put there into rank 0's folder; the paths. Ranks of ``host`` that write into the same folder
    have theirs there already."""
    written: list[str] = []
    for rank in list(ranks)[:MOST_RANKS]:
        if not board.has(f"evidence/{rank}"):
            continue
        try:
            evidence = board.get(f"evidence/{rank}", Evidence)
        except msgspec.MsgspecError:
            # the store is open to whoever reaches its port
            continue
        if evidence.host == host and (Path(folder) / f"rank-{rank:05d}.log").exists():
            continue
        texts = {f"rank-{rank:05d}.{ending}": text for ending, text in evidence.files.items()}
        written += write_files(Path(folder), texts)
    return tuple(written)


def _end(path: Path, most: int) -> str:
    """The last bytes of a file, from the beginning of a line where something was left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            text = file.read(most).decode(errors="replace")
    except OSError:
        return ""
    return text if size <= most else text.partition("\n")[2] or text
