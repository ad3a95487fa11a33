"""The ranks of one host of a hostfile: `python -m dsdoctor.comm.launch.on_host ORDER`, started by one ssh.

ORDER is JSON. What becomes of the ranks goes to stdout, a line of JSON each; rank 0's own words go to stderr. They end when stdin
closes, so with the process that holds its other end, however that one ends. Imports no torch.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from dsdoctor.comm.launch.start import (
    FOLDER,
    MAX_FILE_BYTES,
    Endings,
    HostOrder,
    LocalRanks,
    RankEnded,
    check_room,
    private_folder,
)
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import decode

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class HostTold:
    """A line from a host: a rank that ended, rank 0's document, or the end of a file of the test (``name``, ``text``)."""

    ended: RankEnded | None = None
    document: str | None = None
    name: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Document:
    report: _Kept


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; 0."""
    for number in ENDING:
        signal.signal(number, _leave)
    order = msgspec.json.decode(arguments[0], type=HostOrder)
    try:
        check_room(order.count, LocalHost())
    except ImpossiblePlan as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with private_folder() as (folder, _):
        endings, started = Endings(order), LocalRanks(order, os.environ, folder)

        def hear(ended: RankEnded) -> None:
            _tell(started, ended)
            endings.add(ended)

        try:
            started.follow(hear, lambda: _closed() or endings.over())
        finally:
            started.end()
    return 0


def _tell(started: LocalRanks, ended: RankEnded) -> None:
    told = [HostTold(ended=ended)]
    if ended.rank == 0:
        told = [HostTold(document=started.document()), *files_of(started.document()), *told]
    for each in told:
        sys.stdout.buffer.write(msgspec.json.encode(each) + b"\n")
    sys.stdout.buffer.flush()


def files_of(document: str) -> Iterator[HostTold]:
    """What rank 0 kept of a test that failed: its log, and what others have sent it."""
    try:
        out = decode(document, _Document).report.out
    except msgspec.MsgspecError:
        return
    for path in (Path(out) / "rank-00000.log", *sorted((Path(out) / FOLDER).glob("rank-*"))) if out else ():
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")[-MAX_FILE_BYTES:]
            if text:
                yield HostTold(name=path.name, text=text)


def _closed() -> bool:
    """Whether stdin has closed."""
    return bool(select.select([0], [], [], 0)[0]) and os.read(0, 4096) == b""


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
