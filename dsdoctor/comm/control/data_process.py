"""The data process of a rank, and the fork server that it comes from."""

import contextlib
import faulthandler
import os
import queue
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.comm.control.messages import ExchangeMessage, ExchangeResult, Join, Task, TorchFacts
from dsdoctor.comm.local.fingerprint import versions_here
from dsdoctor.comm.local.limits import limits_now, what_else, why_ended
from dsdoctor.comm.models import CommPhase, RankGroup
from dsdoctor.comm.rendezvous.checks import LOOKING_UP
from dsdoctor.comm.results import Exchange, SkippedStep, Speeds, Timing
from dsdoctor.comm.speed.pace import clocks
from dsdoctor.core.files import PRIVATE, open_new, write_bytes
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.processes import ending_of, fork
from dsdoctor.ranks.flight_recorder import flight_file, recorder_texts
from dsdoctor.rules import book

# The data process of a rank: joins a group of torch.distributed and exchanges. It may hang or die; other processes watch it.
#
# It sends messages over a socket, a line of JSON each, and reads its next work from there. On SIGUSR1 it writes its stack to a
# file, and on an empty order torch's flight recorder.


PRESET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
}
"""Variables of the data process only. torch renamed the buffer's variable in 2.8; NCCL writes to a file for each process."""


def stack_file(folder: str, pid: int) -> Path:
    """Where a data process writes its stacks."""
    return Path(folder) / f"stack-{pid}.txt"


def exchange(join: Join, channel: socket.socket) -> None:
    """Run a data process: join the group, then work until the channel closes."""
    os.environ.update({**PRESET, "NCCL_DEBUG_FILE": f"{join.folder}/nccl.%h.%p.log", **join.variables})
    with open_new(stack_file(join.folder, os.getpid()), mode=PRIVATE) as stacks:
        # the main thread alone: others may run meanwhile, and reading their frames then can end the process
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        sender = _MessageSender(channel)
        work: queue.Queue[Task | None] = queue.Queue()
        threading.Thread(target=_listen, args=(channel, work, join.folder), daemon=True).start()
        try:
            sender.tell(0, "joining the group")
            group = join_group(join)
            while (do := work.get()) is not None:
                sender.say(ExchangeMessage(result=TASKS[do.phase or CommPhase.RIGHT](group, do, sender)))
        except Exception as error:
            # a library may raise anything; its message is sent to rank 0, and the rank's log holds the whole of it
            traceback.print_exc()
            sender.say(ExchangeMessage(error=f"{type(error).__name__}: {error}", stack=frames(error)))
            time.sleep(3600)


def join_group(join: Join) -> RankGroup:
    """Initialise torch.distributed over the job's store. Raises what torch raises."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(join.master, join.port, None, False, timedelta(seconds=join.seconds))
    options: dict[str, Any] = {}
    if join.device != "cpu":
        torch.cuda.set_device(join.device)
        # torch 2.6 hangs with device_id (pytorch#153960)
        if not (2, 6) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
            options["device_id"] = torch.device(join.device)
    dist.init_process_group(
        join.backend,
        store=PrefixStore(join.prefix, store),
        rank=join.rank,
        world_size=join.world,
        timeout=timedelta(seconds=max(join.seconds, 5)),
        **options,
    )
    return RankGroup(rank=join.rank, world=join.world, device=join.device, backend=join.backend, hosts=join.hosts)


def frames(error: BaseException) -> tuple[str, ...]:
    """Where an exception was raised, innermost first, in faulthandler's form."""
    entries = reversed(traceback.extract_tb(error.__traceback__))
    return tuple(f'File "{entry.filename}", line {entry.lineno} in {entry.name}' for entry in entries)


class _MessageSender:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def say(self, message: ExchangeMessage) -> None:
        self._channel.sendall(msgspec.json.encode(message) + b"\n")

    def tell(self, step: int, at: str) -> None:
        self.say(ExchangeMessage(step=step, at=at))

    def skip(self, step: int, reason: str) -> None:
        self.say(ExchangeMessage(step=step, skipped=reason))


def _listen(channel: socket.socket, work: "queue.Queue[Task | None]", folder: str) -> None:
    """Take orders, also while the main thread is inside of a collective."""
    with channel.makefile("rb") as lines:
        for line in lines:
            do = msgspec.json.decode(line, type=Task)
            if do.phase is None:
                _dump_flight_recorder(folder)
            else:
                work.put(do)
    work.put(None)


def _dump_flight_recorder(folder: str) -> None:
    """Write what torch recorded of its collectives, where this torch offers that."""
    for text in recorder_texts()[:1]:
        write_bytes(flight_file(folder, os.getpid()), text.encode(), mode=PRIVATE)


def _right(group: RankGroup, do: Task, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.collectives.calls import steps
    from dsdoctor.comm.collectives.run import run_steps

    return _notable(run_steps(group, steps(do.mode, group), sender, do.seconds * 0.8))


def _speed(group: RankGroup, do: Task, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.speed.pace import groups_here, held, pace, time_pairs
    from dsdoctor.comm.speed.speed import time_collectives

    began, before = time.monotonic(), groups_here()
    own = pace(group, sender.tell)
    pairs = time_pairs(group, sender.tell, do.seconds * 0.3)

    def speeds(timings: tuple[Timing, ...]) -> Speeds:
        quota = held(group.rank, before, groups_here())
        return Speeds(rank=group.rank, timings=timings, pairs=pairs, pace=own, held=quota)

    def keep(timings: tuple[Timing, ...]) -> None:
        sender.say(ExchangeMessage(speeds=speeds(timings)))

    # who is late makes the rest slow, and shows already
    keep(())
    rate = min((pair.size / pair.transfer for pair in pairs if pair.seconds > 0), default=None)
    left = min(do.seconds * 0.5, do.seconds * 0.85 - (time.monotonic() - began))
    timings = time_collectives(group, do.mode, sender.tell, left, rate, keep)
    return ExchangeResult(done=len(timings), speeds=speeds(timings))


def _nodes(group: RankGroup, do: Task, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.speed.speed import time_group

    return ExchangeResult(
        done=1, speeds=Speeds(rank=group.rank, timings=time_group(group, sender.tell, do.seconds * 0.4))
    )


def _deepspeed(group: RankGroup, _: Task, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.collectives.run import run_layer

    return _notable(run_layer(group, sender))


def _notable(exchanges: Sequence[Exchange]) -> ExchangeResult:
    """How many there were, and those that rank 0 has to know."""
    found = tuple(exchanged for exchanged in exchanges if exchanged.wrong or exchanged.skipped)
    return ExchangeResult(done=len(exchanges), exchanges=found)


TASKS: dict[CommPhase, Callable[[RankGroup, Task, _MessageSender], ExchangeResult]] = {
    CommPhase.RIGHT: _right,
    CommPhase.NODES: _nodes,
    CommPhase.SPEED: _speed,
    CommPhase.DEEPSPEED: _deepspeed,
}


# A fork server: a process that imports torch and does nothing else, and every data process is a fork of it.
#
# A new data process so takes milliseconds, and inherits no thread, no connection and no CUDA context. The control process, which
# starts it before it opens anything, needs no torch.


IMPORTING = "importing torch"
MAX_MESSAGE_BYTES = 1 << 20
SHORT_TIMEOUT = timedelta(seconds=2)
"""For a connection to this very process."""
REAPING = 0.05


class Data:
    """A data process as its control process sees it: ``step`` and ``at`` are from its last message."""

    def __init__(self, pid: int, join: Join, channel: socket.socket, fork_server: "ForkServer") -> None:
        self.pid, self.group, self.folder = pid, join.prefix, join.folder
        self._channel, self._fork_server = channel, fork_server
        self._rest = b""
        self.step, self.at, self.moved = 0, "starting", time.monotonic()
        self.left_out: tuple[SkippedStep, ...] = ()

    def do(self, work: Task) -> None:
        """Give it its next work. A process that is dead already is noticed by ``ended``."""
        if work.phase is not None:
            self.left_out = ()
        try:
            self._channel.sendall(msgspec.json.encode(work) + b"\n")
        except OSError:
            return

    def messages(self) -> Iterator[ExchangeMessage]:
        """The messages that came since the last call."""
        while select.select([self._channel], [], [], 0)[0]:
            try:
                part = self._channel.recv(MAX_MESSAGE_BYTES)
            except OSError:
                return
            if not part:
                return
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                message = msgspec.json.decode(line, type=ExchangeMessage)
                self.moved = time.monotonic()
                if message.at:
                    self.step, self.at = message.step, message.at
                if message.skipped:
                    self.left_out += (SkippedStep(step=message.step, at=self.at, reason=message.skipped),)
                yield message

    def ended(self) -> str | None:
        """How it died, None while it lives."""
        return self._fork_server.ending(self.pid)

    def ask_stack(self) -> None:
        """Have it write its Python stacks and the flight recorder to the folder, which takes about a tenth of a second."""
        self.do(Task())
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return

    def stack(self) -> tuple[str, ...]:
        """The stack of its main thread, innermost first, as far as it was written."""
        try:
            text = stack_file(self.folder, self.pid).read_text(errors="replace")
        except OSError:
            return ()
        _, _, main = text.rpartition("(most recent call first):\n")
        return tuple(line.strip() for line in main.splitlines() if line.strip())

    def kill(self) -> None:
        """End it."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._channel.close()


@dataclass(frozen=True, kw_only=True)
class ForkServerMessage:
    """A message of the fork server: what it is in before it serves, the facts once it does; the number of a data process that was
    started, and how one has ended."""

    at: str = ""
    torch: TorchFacts | None = None
    started: int = 0
    ended: int = 0
    status: int = 0


class ForkServer:
    """Made by a control process before it opens anything. ``at``: what it is in until ``facts`` are there."""

    def __init__(self, backend: str, *, gpus: bool) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._endings: dict[int, int] = {}
        self._facts: TorchFacts | None = None
        self._limits = limits_now()
        self.at, self.began = IMPORTING, time.monotonic()
        self.pid = fork(lambda: _serve(theirs, self._mine, backend, gpus=gpus))
        theirs.close()

    @property
    def facts(self) -> TorchFacts | None:
        """What is known of torch, None as long as it is imported. Where that ended the process, how."""
        try:
            while self._facts is None and select.select([self._mine], [], [], 0)[0]:
                self._receive()
        except ConnectionError:
            ended = ending_of(os.waitpid(self.pid, 0)[1]) or "exit status 0"
            now = limits_now()
            cause = why_ended(self._limits, now, ended=ended, error=None)
            perhaps = what_else(self._limits, now, ended=ended)
            because = f": {cause}" if cause else f"; {perhaps}" if perhaps else ""
            self._facts = TorchFacts(
                unable=f"{ended} in {self.at!r}{because}",
                rule="control-lost",
                error=ended,
                cause=cause,
                perhaps=perhaps,
            )
        return self._facts

    def start(self, join: Join) -> Data:
        """A new data process. Raises ConnectionError where the fork server is gone."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._mine, [msgspec.json.encode(join)], [theirs.fileno()])
        while not (pid := self._receive().started):
            continue
        return Data(pid, join, mine, self)

    def ending(self, pid: int) -> str | None:
        """How a data process ended, None while it lives."""
        while select.select([self._mine], [], [], 0)[0]:
            self._receive()
        if pid not in self._endings:
            return None
        return ending_of(self._endings[pid]) or "it ended with exit status 0"

    def _receive(self) -> ForkServerMessage:
        text = self._mine.recv(MAX_MESSAGE_BYTES)
        if not text:
            raise ConnectionError("the process that starts data processes has ended")
        message = msgspec.json.decode(text, type=ForkServerMessage)
        self.at = message.at or self.at
        self._facts = self._facts or message.torch
        if message.ended:
            self._endings[message.ended] = message.status
        return message


def _imported(backend: str, *, gpus: bool) -> TorchFacts:
    """Import torch, and what is known then. ``gpus``: whether this host has any."""
    try:
        import torch.distributed as dist

        has_nccl = dist.is_nccl_available()
        facts = TorchFacts(versions=versions_here(), delayed=clocks()[2])
    except Exception as error:
        # a broken torch may raise anything; the reason becomes this rank's finding
        traceback.print_exc()
        text = " ".join(str(error).split())[:200]
        unable = torch_unusable("", text, type(error).__name__).title
        return TorchFacts(unable=unable, rule="torch-unusable", error=text, kind=type(error).__name__)
    if backend == "nccl" and not has_nccl:
        return TorchFacts(unable=nccl_unavailable("").title, rule="nccl-unavailable")
    return replace(facts, backend=backend if backend != "auto" else "nccl" if has_nccl and gpus else "gloo")


def torch_unusable(who: str, error: str, kind: str) -> Finding:
    """torch cannot be imported by this rank's Python."""
    evidence = (f"by the Python of that rank: {kind}",)
    return book.finding("torch-unusable", Severity.ERROR, evidence=evidence, who=who, error=error)


def nccl_unavailable(who: str) -> Finding:
    """NCCL was asked for, and this rank's torch has none."""
    return book.finding("nccl-unavailable", Severity.ERROR, who=who)


def _ask_name_server() -> None:
    """Have torch ask the name server now, once for all data processes: it does so before the first connection of a process, which
    takes longer than a rank may stand still where no name server answers. A store that is not needed is opened for that."""
    with contextlib.suppress(Exception):
        # torch raises another type in each release
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        TCPStore(loopback(), 0, None, True, SHORT_TIMEOUT, wait_for_workers=False)


def loopback() -> str:
    """The loopback address of this network namespace: one may have IPv6 alone. torch tries the other for as long as it may."""
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def _serve(channel: socket.socket, other: socket.socket, backend: str, *, gpus: bool) -> None:
    """The fork server: import torch, then fork on request, and report which process ended and how."""

    def say(message: ForkServerMessage) -> None:
        channel.send(msgspec.json.encode(message))

    other.close()
    facts = _imported(backend, gpus=gpus)
    if not facts.unable:
        say(ForkServerMessage(at=LOOKING_UP))
        _ask_name_server()
    say(ForkServerMessage(torch=facts))
    alive: set[int] = set()
    while True:
        if select.select([channel], [], [], REAPING if alive else None)[0]:
            message, handles, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
            if not message:
                return
            join, given = msgspec.json.decode(message, type=Join), socket.socket(fileno=handles[0])

            def child(join: Join = join, given: socket.socket = given) -> None:
                channel.close()
                exchange(join, given)

            pid = fork(child)
            given.close()
            alive.add(pid)
            say(ForkServerMessage(started=pid))
        for pid in tuple(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                say(ForkServerMessage(ended=pid, status=status))
