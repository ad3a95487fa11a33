"""A process that comes to the board of a test that has begun: it is none of its ranks, and learns who is."""

import time
from pathlib import Path

import pytest

from dsdoctor.comm.control.data_process import ForkServer
from dsdoctor.comm.control.member import GATHERED, Member
from dsdoctor.comm.control.messages import RankOrder, StartInfo
from dsdoctor.comm.models import Claim, CommPhase, CommSettings, Local
from dsdoctor.comm.rendezvous.store import MessageBoard
from tests.comm.made_claims import claim, rank
from tests.comm.test_board import Memory


def member(number: int, board: MessageBoard, folder: Path) -> Member:
    me = rank(number, world=2, master="127.0.0.1")
    briefing = StartInfo(
        rank=me, settings=CommSettings(), local=Local(hostname="nodea"), folder=str(folder), began=time.monotonic()
    )
    return Member(briefing, board, ForkServer.__new__(ForkServer), lambda _: None)


@pytest.mark.parametrize("read", range(4))
def test_who_came_before_rank_0_began_is_in_and_who_came_later_is_told_who_has_its_place(
    read: int, tmp_path: Path
) -> None:
    board = MessageBoard(Memory(), "p")
    came = [member(number, board, tmp_path) for number in (0, 1, 0)]
    for one in came:
        one.arrive()
    board.put(GATHERED, read)
    board.put("order/1", RankOrder(number=1, phase=CommPhase.MESH))
    until = time.monotonic() + 20
    assert [one.replaced_processes(until) for one in came] == [()] * 3, "rank 0 knows of none of them"

    board.put("at/0", claim(0, pid=7))
    told = [one.replaced_processes(until) for one in came]

    assert [[there.pid for there in found] for found in told[::2]] == [
        [] if number < read else [7] for number in (0, 2)
    ]
    assert told[1] == (), "a rank that is missing there is in nobody's place"
    assert board.get("at/0", Claim).pid == 7, "who comes does not write where others look for a rank"
