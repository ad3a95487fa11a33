"""All ranks but rank 0 in one process, for benchmarks.comm_hosts: they claim, answer orders and exchange nothing.

python -m benchmarks.simulated_ranks WORLD missing|dies SICK,SICK,...
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from dsdoctor.comm.control.messages import RankAnswer, RankOrder
from dsdoctor.comm.launch.rank import rank_of
from dsdoctor.comm.local.facts import look_local
from dsdoctor.comm.local.fingerprint import fingerprint, versions_here
from dsdoctor.comm.mesh.mesh import MeshListener, peers
from dsdoctor.comm.models import Claim, CommPhase, Rank
from dsdoctor.comm.rendezvous.store import MessageBoard, StoreUnreachable, open_board
from dsdoctor.comm.results import ConnectOutcome, Reach, Stuck
from dsdoctor.core.host import LocalHost


def claims(me: Rank) -> dict[int, Claim]:
    """A claim for each rank, of hosts that are alike."""
    import torch  # noqa: F401 - as a rank would have it

    local = look_local(LocalHost(), me, "gloo")
    made = fingerprint(local, versions_here())
    found = {}
    for rank in range(1, me.world):
        address = address_of(rank)
        claim = Claim(
            rank=rank, world=me.world, local_rank=rank % 8, host=me.hosts[rank], pid=100_000 + rank, address=address,
            port=40_000, interface="eth0", started=time.time(), arrived=time.time(), fingerprint=made,
            local=replace(local, hostname=me.hosts[rank]),
        )  # fmt: skip
        found[rank] = claim
    return found


def address_of(rank: int) -> str:
    """The address of a rank's host, which the node of the benchmark answers to."""
    return f"10.201.{rank // 8 // 200}.{1 + rank // 8 % 200}"


def main(argv: Sequence[str]) -> None:
    """Claim, then answer until rank 0 says that it is over."""
    world, kind, sick = int(argv[0]), argv[1], {int(rank) for rank in argv[2].split(",")}
    me = rank_of({**os.environ, "RANK": "1", "LOCAL_RANK": "1"})
    assert me is not None
    made = claims(me)
    board = open_board(me, 60.0)
    if isinstance(board, StoreUnreachable):
        raise SystemExit(str(board))
    for rank in peers(0, world):
        listener = MeshListener(address_of(rank))
        listener.answer(board.prefix, rank)
        made[rank] = replace(made[rank], port=listener.port)
    for rank, claim in made.items():
        if kind != "missing" or rank not in sick:
            board.put(f"at/{rank}", replace(claim, local=None, fingerprint={}))
            board.log("claims").write(claim)
    number = 1
    while True:
        while not board.wait(f"order/{number}", 60.0):
            continue
        order = board.get(f"order/{number}", RankOrder)
        if order.status is not None:
            for rank in made:
                board.log("ends").write(rank)
            return
        answer(board, order, made, sick, world)
        number += 1


def answer(board: MessageBoard, order: RankOrder, made: dict[int, Claim], sick: set[int], world: int) -> None:
    """What each rank says to an order: the mesh is well; in the collectives the sick ones die and the others wait."""
    for rank in made:
        said = RankAnswer(rank=rank)
        if order.phase is CommPhase.MESH:
            said = replace(said, reaches=tuple(reached(rank, other) for other in peers(rank, world)))
        elif order.phase is CommPhase.RIGHT and rank in sick:
            gone = Stuck(rank=rank, at="all_reduce sum float32 x 1024", step=3, seconds=1.0, ended="killed by SIGKILL")
            said = replace(said, stuck=gone)
        elif order.phase is CommPhase.RIGHT:
            said = replace(said, stuck=Stuck(rank=rank, at="all_reduce sum float32 x 1024", step=3, seconds=1.0))
        board.log(f"answers/{order.number}").write(said)


def reached(rank: int, other: int) -> Reach:
    """A direction that is well."""
    return Reach(source=rank, target=other, outcome=ConnectOutcome.REACHED, seconds=0.001, bandwidth=1e9, rtt=1e-4)


if __name__ == "__main__":
    main(sys.argv[1:])
