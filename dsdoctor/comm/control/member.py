"""One rank's part in the test: its claim, then rank 0's orders until the end. Runs in the control process."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from dsdoctor.comm.control.evidence import put_evidence
from dsdoctor.comm.control.fork_server import Data, ForkServer
from dsdoctor.comm.control.jobs import Job, RunJob, ThreadJob
from dsdoctor.comm.control.limits_reached import limits_now
from dsdoctor.comm.control.messages import Briefing, Join, News, RankAnswer, RankOrder
from dsdoctor.comm.local.counters import read_counters
from dsdoctor.comm.local.fingerprint import fingerprint, versions_here
from dsdoctor.comm.mesh.mesh import MeshListener, peers, reach_all
from dsdoctor.comm.models import Claim, CommPhase
from dsdoctor.comm.rendezvous.board import Board
from dsdoctor.comm.speed.processors import clocks
from dsdoctor.core.files import write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import state_of

PACE = 0.02
"""Seconds between two looks at the board; more above a thousand ranks, so that rank 0's store gets at most 50,000 requests
a second."""
AFTER_RANK_ZERO = 0.7
"""Seconds that a rank waits for rank 0's process to end first."""
GATHERED = "gathered"
"""The number of claims that rank 0 had read when it began; ``at/RANK`` are those that it then took."""
Say = Callable[[News], None]


class Member:
    """A rank that has come: its claim is on the board and its port answers."""

    def __init__(self, briefing: Briefing, board: Board, fork_server: ForkServer, backend: str, say: Say) -> None:
        self.briefing, self.board, self.say = briefing, board, say
        self.rank, self.backend = briefing.rank.rank, backend
        self.world = briefing.rank.world
        self._fork_server = fork_server
        self._data: Data | None = None
        self._listeners = _listeners(briefing)
        self.claim = _claim(briefing, self._listeners, backend)
        for listener in self._listeners:
            listener.answer(board.prefix, self.rank)
        self._limits = limits_now()
        self.pace = max(PACE, self.world / 50_000)
        self._number = 0
        self._answers: list[RankAnswer] = []

    def arrive(self) -> None:
        """Write the claim."""
        self._number = self.board.log("claims").write(self.claim)
        self._note()

    def displaced(self, until: float) -> tuple[Claim, ...]:
        """The processes that were there, rank 0 and the one that is this rank, where rank 0 had begun without this one: its order
        to the ranks that it knows is no order to this one, which would spoil their test."""
        if self._await(1, until) is None or self._number <= self.board.get(GATHERED, int):
            return ()
        there = [self.board.get(f"at/{rank}", Claim) for rank in sorted({0, self.rank}) if self.board.has(f"at/{rank}")]
        return tuple(there) if there and there[-1].rank == self.rank else ()

    def follow(self, until: float) -> int | None:
        """Do what rank 0 orders until its last order; the exit status it gave, or None where no order came in time."""
        number = 1
        while (order := self._await(number, until)) is not None:
            if order.status is not None:
                self.board.log("ends").write(self.rank)
                self.clear()
                self._wait_for_rank_zero(order.status)
                return order.status
            self.say(News(at=order.phase.value))
            self.post(order, self._work(order))
            number += 1
        self.clear()
        return None

    def begin(self, order: RankOrder) -> Job:
        """Start the work of an order."""
        if order.phase is CommPhase.MESH:
            others = tuple(self.board.get(f"at/{rank}", Claim) for rank in peers(self.rank, self.world))
            return ThreadJob(self.rank, lambda: self._mesh(others, order.seconds))
        if order.phase is CommPhase.LOCAL:
            return ThreadJob(self.rank, self._count)
        group = next((group for group in order.groups if self.rank in group), ()) if order.groups else range(self.world)
        if len(group) < (1 if not order.groups else 2):
            return ThreadJob(self.rank, lambda: RankAnswer(rank=self.rank))
        return RunJob(
            self.rank, self._process(self._join(order, tuple(group))), order, self.briefing.settings, self._limits
        )

    def post(self, order: RankOrder, answer: RankAnswer) -> None:
        """Write an answer to rank 0, and to this rank's own file."""
        answer = replace(answer, supervisor=state_of(os.getppid()))
        self._answers.append(answer)
        self._note()
        if answer.stuck:
            put_evidence(self.board, self.rank, self.world, self.claim.host, self.briefing.folder, answer.process)
        self.board.log(f"answers/{order.number}").write(answer)

    def clear(self) -> None:
        """End what is still running."""
        if self._data is not None:
            self._data.kill()
        self._data = None

    def _process(self, join: Join) -> Data:
        """The data process that is in the group already, or a new one."""
        if self._data is None or self._data.group != join.prefix or self._data.ended():
            self.clear()
            self._data = self._fork_server.start(join)
        return self._data

    def _mesh(self, others: tuple[Claim, ...], seconds: float) -> RankAnswer:
        return RankAnswer(rank=self.rank, reaches=reach_all(self.claim, others, self.board.prefix, seconds=seconds))

    def _count(self) -> RankAnswer:
        counters = read_counters(LocalHost()) if self.claim.local_rank == 0 else {}
        return RankAnswer(rank=self.rank, counters=counters)

    def _await(self, number: int, until: float) -> RankOrder | None:
        while not self.board.has(f"order/{number}"):
            if time.monotonic() > until:
                return None
            time.sleep(self.pace)
        return self.board.get(f"order/{number}", RankOrder)

    def _wait_for_rank_zero(self, status: int) -> None:
        """Let rank 0 end first where something is wrong: a launcher ends all ranks as soon as one has failed."""
        until = time.monotonic() + AFTER_RANK_ZERO
        with contextlib.suppress(Exception):
            # torch raises when the store is gone, which is what is waited for
            while status and time.monotonic() < until:
                self.board.has("gone")
                time.sleep(self.pace)

    def _work(self, order: RankOrder) -> RankAnswer:
        job = self.begin(order)
        while (answer := job.poll()) is None:
            if self.board.has(f"stop/{order.number}"):
                return job.stop()
            time.sleep(self.pace)
        return answer

    def _join(self, order: RankOrder, group: tuple[int, ...]) -> Join:
        rank = self.briefing.rank
        # each group gets its own keys in the store
        place = f"{self.board.prefix}/group/{order.group}" + (f"/{group[0]}" if order.groups else "/all")
        return Join(
            rank=group.index(self.rank),
            world=len(group),
            backend=self.backend,
            device=self._device(),
            hosts=tuple(self.board.get(f"at/{peer}", Claim).host for peer in group) if len(group) <= 64 else (),
            master=rank.master,
            port=rank.port,
            prefix=place,
            seconds=order.seconds,
            variables=order.variables,
            folder=self.briefing.folder,
        )

    def _device(self) -> str:
        if self.backend != "nccl":
            return "cpu"
        local_rank, count = self.briefing.rank.local_rank, len(self.briefing.local.gpus)
        return f"cuda:{local_rank % count if count else local_rank}"

    def _note(self) -> None:
        """Write this rank's own file; it is replaced whole."""
        path = Path(self.briefing.folder) / f"rank-{self.rank:05d}.json"
        write_bytes(path, msgspec.json.encode({"schema": "dsdoctor/1", "claim": self.claim, "answers": self._answers}))


def _listeners(briefing: Briefing) -> list[MeshListener]:
    """A port on the interface that the backend would take, and one on the interface that reaches the master."""
    found: list[MeshListener] = []
    for chosen in (briefing.local.chosen, briefing.local.routed):
        if chosen and chosen.address not in {listener.address for listener in found}:
            try:
                found.append(MeshListener(chosen.address))
            except OSError:
                continue
    return found or [MeshListener("127.0.0.1")]


def _claim(briefing: Briefing, listeners: list[MeshListener], backend: str) -> Claim:
    rank, local = briefing.rank, briefing.local
    other = listeners[1] if len(listeners) > 1 else None
    gpu = local.gpus[rank.local_rank % len(local.gpus)] if local.gpus and backend == "nccl" else None
    return Claim(
        rank=rank.rank,
        world=rank.world,
        local_rank=rank.local_rank,
        host=local.hostname,
        pid=os.getppid(),
        address=listeners[0].address,
        port=listeners[0].port,
        other=other.address if other else None,
        other_port=other.port if other else None,
        interface=local.chosen.name if local.chosen else "",
        gpu=gpu.uuid if gpu else None,
        started=time.time() - (time.monotonic() - briefing.began),
        arrived=time.time(),
        delayed=clocks()[2],
        backend=backend,
        fingerprint=fingerprint(local, versions_here()),
        local=local,
    )
