"""One rank's part in the test: its claim, then rank 0's orders until the end. Runs in the control process."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dsdoctor.comm.collectives.nccl import relevant_lines
from dsdoctor.comm.control.data_process import IMPORTING, Data, ForkServer, nccl_unavailable, torch_unusable
from dsdoctor.comm.control.messages import (
    ExchangeResult,
    Join,
    RankAnswer,
    RankOrder,
    StartInfo,
    Task,
    TorchFacts,
    Update,
)
from dsdoctor.comm.launch.start import MAX_FILE_BYTES, write_files
from dsdoctor.comm.local.checks import too_little
from dsdoctor.comm.local.facts import read_counters
from dsdoctor.comm.local.fingerprint import fingerprint, installed_versions
from dsdoctor.comm.local.limits import Limits, limits_now, what_else, why_ended
from dsdoctor.comm.mesh.mesh import MeshListener, peers, reach_all
from dsdoctor.comm.models import Claim, CommPhase, CommSettings
from dsdoctor.comm.rendezvous.store import MessageBoard
from dsdoctor.comm.results import Speeds, Stuck
from dsdoctor.comm.speed.pace import clocks
from dsdoctor.core.files import write_bytes
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import state_of
from dsdoctor.ranks.flight_recorder import flight_file, read_recorded
from dsdoctor.rules import book

# What a rank that is stuck or died has written (log, stacks, flight recorder) -> rank 0's folder, over the board.
#
# A rank puts the ends of its files on the board before it answers; rank 0 takes those of the ranks that matter, as far as their
# files are not in its own folder anyway.


ALL_RANKS = 1 << 24
"""Bytes of all ranks together: rank 0's store holds them in memory."""
MAX_EVIDENCE_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The ends of a rank's files, "" where there is none, by what the names of the files end in."""

    host: str
    files: dict[str, str]


def put_evidence(board: MessageBoard, rank: int, world: int, host: str, folder: str, process: int) -> None:
    """Write what this rank has to the board. ``process`` is its data process."""
    most, here = min(MAX_FILE_BYTES, ALL_RANKS // world), Path(folder)
    nccl = next(iter(sorted(here.glob(f"nccl.*.{process}.log"))), here / "none")
    files = {
        "log": here / f"rank-{rank:05d}.log",
        "stack.txt": here / f"stack-{process}.txt",
        "flight.json": flight_file(folder, process),
        "nccl.log": nccl,
    }
    ends = {ending: _end(path, most) for ending, path in files.items()}
    board.put(f"evidence/{rank}", Evidence(host=host, files=ends))


def take_evidence(board: MessageBoard, ranks: Iterable[int], folder: str, host: str) -> tuple[str, ...]:
    """Write what these ranks have put there into rank 0's folder; the paths. Ranks of ``host`` that write into the same folder
    have theirs there already."""
    written: list[str] = []
    for rank in list(ranks)[:MAX_EVIDENCE_RANKS]:
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


# What a rank does for an order: what is short in a thread, an exchange in a data process. Polled, so that it can be stopped.


STACK_TIME = 0.3
TAIL = 5.0
"""Seconds a data process may take beyond its order before its own rank ends it."""


class ThreadJob:
    """Work in a thread, which is left to itself when it has to stop."""

    step, at = 0, ""

    def __init__(self, rank: int, work: Callable[[], RankAnswer]) -> None:
        self._rank, self._answers = rank, list[RankAnswer]()
        threading.Thread(target=lambda: self._answers.append(work()), daemon=True).start()

    def poll(self) -> RankAnswer | None:
        """The answer, once there is one."""
        return self._answers[0] if self._answers else None

    def stop(self) -> RankAnswer:
        """The answer; an empty one where the work has not ended."""
        return self.poll() or RankAnswer(rank=self._rank)


class ImportJob:
    """The wait for the import of torch, which goes on when it has to stop."""

    step = 0

    def __init__(self, briefing: StartInfo, fork_server: ForkServer) -> None:
        self._briefing, self._fork_server = briefing, fork_server

    @property
    def at(self) -> str:
        """What the import is in."""
        return self._fork_server.at

    def poll(self) -> RankAnswer | None:
        """What is known of torch."""
        if (facts := self._fork_server.facts) is None:
            return None
        rank, local = self._briefing.rank, self._briefing.local
        # where the limits of a rank leave it hardly anything, they are why it cannot take part
        limits = too_little(rank, local, backend=self._briefing.settings.backend, who="") if facts.unable else ()
        unable = limits[0].title if limits else facts.unable
        took = time.monotonic() - self._briefing.began
        return RankAnswer(rank=rank.rank, torch=replace(facts, unable=unable, seconds=took))

    def stop(self) -> RankAnswer:
        """The same, or how long it has taken so far."""
        took = time.monotonic() - self._fork_server.began
        return self.poll() or RankAnswer(rank=self._briefing.rank.rank, doing=self.at, seconds=took)


class RunJob:
    """An exchange in a data process, a fresh one or the one that is in the group already."""

    def __init__(self, rank: int, data: Data, order: RankOrder, settings: CommSettings, limits: Limits) -> None:
        self._rank, self._data, self._seconds, self._limits = rank, data, order.seconds, limits
        self._began = time.monotonic()
        self._error: str | None = None
        self._raised_in: tuple[str, ...] = ()
        self._result: ExchangeResult | None = None
        self._speeds: Speeds | None = None
        data.do(Task(phase=order.phase, mode=settings.mode, seconds=order.seconds))

    @property
    def step(self) -> int:
        """The number of the exchange it is in."""
        return self._data.step

    @property
    def at(self) -> str:
        """What it is in, such as "importing deepspeed"."""
        return self._data.at

    def poll(self) -> RankAnswer | None:
        """The result, or how it ended without one."""
        for message in self._data.messages():
            self._result = message.result or self._result
            self._speeds = message.speeds or self._speeds
            if message.error:
                self._error, self._raised_in = message.error, message.stack
        if self._result:
            return self._answer(result=self._result)
        if self._error or self._data.ended():
            if self._error and not self._data.ended():
                # its flight recorder is written for who looks at it later
                self._data.ask_stack()
                time.sleep(STACK_TIME)
            return self._answer(stuck=self._stuck(self._raised_in))
        return self.stop() if self._age() > self._seconds + TAIL else None

    def stop(self) -> RankAnswer:
        """Where it is, with its stack; the process is killed."""
        answer = None if self._age() > self._seconds + TAIL else self.poll()
        if answer:
            return answer
        state, ended = state_of(self._data.pid), self._data.ended()
        self._data.ask_stack()
        time.sleep(STACK_TIME)
        # what asking did to the process is not what it died of
        stuck = replace(self._stuck(self._data.stack(), state), ended=ended)
        self._data.kill()
        return self._answer(stuck=stuck)

    def _answer(self, *, result: ExchangeResult | None = None, stuck: Stuck | None = None) -> RankAnswer:
        nccl = relevant_lines(self._data.folder, self._data.pid)
        return RankAnswer(
            rank=self._rank,
            result=result,
            stuck=stuck,
            left_out=self._data.left_out,
            speeds=self._speeds,
            nccl=nccl,
            process=self._data.pid,
        )

    def _stuck(self, stack: tuple[str, ...], state: str = "") -> Stuck:
        recorded = read_recorded(flight_file(self._data.folder, self._data.pid))
        ended = self._data.ended()
        now = limits_now() if ended or self._error else self._limits
        return Stuck(
            rank=self._rank,
            at=self._data.at,
            step=self._data.step,
            seconds=self._age(),
            process=state or state_of(self._data.pid),
            ended=ended,
            error=self._error,
            stack=stack,
            sequence=recorded.sequence if recorded else None,
            operation=f"{recorded.operation} of {recorded.size or '?'}" if recorded else "",
            quiet=min(time.monotonic() - self._data.moved, self._age()),
            cause=why_ended(self._limits, now, ended=ended, error=self._error),
            perhaps=what_else(self._limits, now, ended=ended),
        )

    def _age(self) -> float:
        return time.monotonic() - self._began


Job = ThreadJob | ImportJob | RunJob


PACE = 0.02
"""Seconds between two looks at the own work."""
AFTER_RANK_ZERO = 0.7
"""Seconds that a rank waits for rank 0's process to end first."""
GATHERED = "gathered"
"""The number of claims that rank 0 had read when it began; ``at/RANK`` are those that it then took."""
Say = Callable[[Update], None]


class Member:
    """A rank that has come: its claim is on the board and its port answers."""

    def __init__(self, briefing: StartInfo, board: MessageBoard, fork_server: ForkServer, say: Say) -> None:
        self.briefing, self.board, self.say = briefing, board, say
        self.rank, self.world = briefing.rank.rank, briefing.rank.world
        backend = briefing.settings.backend
        # with GPUs and a torch without NCCL it is gloo after all, which is known once torch is imported
        self.backend = backend if backend != "auto" else "nccl" if briefing.local.gpus else "gloo"
        self._fork_server = fork_server
        self._data: Data | None = None
        self._listeners = _listeners(briefing)
        self.claim = _claim(briefing, self._listeners, self.backend)
        for listener in self._listeners:
            listener.answer(board.prefix, self.rank)
        self._limits = limits_now()
        self._number = 0
        self._answers: list[RankAnswer] = []
        self.verdict = ""

    def arrive(self) -> None:
        """Write the claim."""
        self._number = self.board.log("claims").write(self.claim)
        self._note()

    def replaced_processes(self, until: float) -> tuple[Claim, ...]:
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
                self.verdict = order.verdict
                self.board.log("ends").write(self.rank)
                self.clear()
                self._wait_for_rank_zero(order.status)
                return order.status
            self.say(Update(at=IMPORTING if order.phase is CommPhase.SAME else order.phase.value))
            self.post(order, self._work(order))
            number += 1
        self.clear()
        return None

    def begin(self, order: RankOrder) -> Job:
        """Start the work of an order."""
        if order.phase is CommPhase.MESH:
            others = tuple(self.board.get(f"at/{rank}", Claim) for rank in peers(self.rank, self.world))
            token = self.board.prefix
            return ThreadJob(
                self.rank,
                lambda: RankAnswer(rank=self.rank, reaches=reach_all(self.claim, others, token, seconds=order.seconds)),
            )
        if order.phase is CommPhase.LOCAL:
            return ThreadJob(self.rank, self._count)
        if order.phase is CommPhase.SAME:
            return ImportJob(self.briefing, self._fork_server)
        group = next((group for group in order.groups if self.rank in group), ()) if order.groups else range(self.world)
        if len(group) < (1 if not order.groups else 2):
            return ThreadJob(self.rank, lambda: RankAnswer(rank=self.rank))
        join = self._join(order, tuple(group))
        try:
            data = self._process(join)
        except ConnectionError as error:
            # the process that would start it was killed
            dead = Stuck(rank=self.rank, at="starting", step=0, seconds=0.0, ended=str(error))
            return ThreadJob(self.rank, lambda: RankAnswer(rank=self.rank, stuck=dead))
        return RunJob(self.rank, data, order, self.briefing.settings, self._limits)

    def post(self, order: RankOrder, answer: RankAnswer) -> None:
        """Write an answer to rank 0, and to this rank's own file."""
        answer = replace(answer, supervisor=state_of(os.getppid()))
        self.backend = answer.torch.backend or self.backend if answer.torch else self.backend
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

    def _count(self) -> RankAnswer:
        counters = read_counters(LocalHost()) if self.claim.local_rank == 0 else {}
        return RankAnswer(rank=self.rank, counters=counters)

    def _await(self, number: int, until: float) -> RankOrder | None:
        name = f"order/{number}"
        return self.board.get(name, RankOrder) if self.board.wait(name, until - time.monotonic()) else None

    def _wait_for_rank_zero(self, status: int) -> None:
        """Let rank 0 end first where something is wrong: a launcher ends all ranks as soon as one has failed."""
        with contextlib.suppress(OSError):
            # the store is gone, which is what is waited for
            self.board.wait("gone", AFTER_RANK_ZERO if status else 0.0)

    def _work(self, order: RankOrder) -> RankAnswer:
        job = self.begin(order)
        while (answer := job.poll()) is None:
            if self.board.wait(f"stop/{order.number}", PACE):
                return job.stop()
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
        with contextlib.suppress(OSError):
            # a full disk keeps no rank from coming
            write_bytes(
                path, msgspec.json.encode({"schema": "dsdoctor/1", "claim": self.claim, "answers": self._answers})
            )


def why_unable(facts: TorchFacts, briefing: StartInfo) -> Finding:
    """Why a rank cannot take part, in its own words."""
    rank, host = briefing.rank, briefing.local.hostname
    who = f"rank {rank.rank} ({host}): "
    if facts.rule == "torch-unusable":
        return torch_unusable(who, facts.error, facts.kind)
    if facts.rule == "nccl-unavailable":
        return nccl_unavailable(who)
    return book.finding(
        "control-lost",
        Severity.ERROR,
        case="died-limit" if facts.cause else "died-perhaps" if facts.perhaps else "died",
        rank=rank.rank,
        host=host,
        ending=facts.error,
        at=repr(IMPORTING),
        limit=facts.cause,
        perhaps=facts.perhaps,
        log=f"{briefing.folder}/rank-{rank.rank:05d}.log",
    )


def _listeners(briefing: StartInfo) -> list[MeshListener]:
    """A port on the interface that the backend would take, and one on the interface that reaches the master."""
    found: list[MeshListener] = []
    for chosen in (briefing.local.chosen, briefing.local.routed):
        if chosen and chosen.address not in {listener.address for listener in found}:
            try:
                found.append(MeshListener(chosen.address))
            except OSError:
                continue
    return found or [MeshListener("127.0.0.1")]


def _claim(briefing: StartInfo, listeners: list[MeshListener], backend: str) -> Claim:
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
        fingerprint=fingerprint(local, installed_versions()),
        local=local,
    )
