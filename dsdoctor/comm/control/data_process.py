"""The data process of a rank: joins a group of torch.distributed and exchanges. It may hang or die; other processes watch it.

It sends messages over a socket, a line of JSON each, and reads its next work from there. On SIGUSR1 it writes its stack to a
file, and on an empty order torch's flight recorder.
"""

import faulthandler
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.comm.control.messages import Do, ExchangeMessage, ExchangeResult, Join
from dsdoctor.comm.models import CommPhase, RankGroup
from dsdoctor.comm.results import Exchange, Speeds, Timing
from dsdoctor.core.files import PRIVATE, open_new, write_bytes
from dsdoctor.ranks.flight_recorder import flight_file

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
        work: queue.Queue[Do | None] = queue.Queue()
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


def _listen(channel: socket.socket, work: "queue.Queue[Do | None]", folder: str) -> None:
    """Take orders, also while the main thread is inside of a collective."""
    with channel.makefile("rb") as lines:
        for line in lines:
            do = msgspec.json.decode(line, type=Do)
            if do.phase is None:
                _dump_flight_recorder(folder)
            else:
                work.put(do)
    work.put(None)


def _dump_flight_recorder(folder: str) -> None:
    """Write what torch recorded of its collectives, where this torch offers that."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is not None:
        text = dump()
        content = text if isinstance(text, bytes) else text.encode()
        write_bytes(flight_file(folder, os.getpid()), content, mode=PRIVATE)


def _right(group: RankGroup, do: Do, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.collectives.catalogue import steps
    from dsdoctor.comm.collectives.run import run_steps

    return _notable(run_steps(group, steps(do.mode, group), sender, do.seconds * 0.8))


def _speed(group: RankGroup, do: Do, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.speed.pace import pace
    from dsdoctor.comm.speed.pairs import time_pairs
    from dsdoctor.comm.speed.processors import groups_here, held
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


def _nodes(group: RankGroup, do: Do, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.speed.speed import time_group

    return ExchangeResult(
        done=1, speeds=Speeds(rank=group.rank, timings=time_group(group, sender.tell, do.seconds * 0.4))
    )


def _deepspeed(group: RankGroup, _: Do, sender: _MessageSender) -> ExchangeResult:
    from dsdoctor.comm.collectives.deepspeed import run_layer

    return _notable(run_layer(group, sender))


def _notable(exchanges: Sequence[Exchange]) -> ExchangeResult:
    """How many there were, and those that rank 0 has to know."""
    found = tuple(exchanged for exchanged in exchanges if exchanged.wrong or exchanged.skipped)
    return ExchangeResult(done=len(exchanges), exchanges=found)


TASKS: dict[CommPhase, Callable[[RankGroup, Do, _MessageSender], ExchangeResult]] = {
    CommPhase.RIGHT: _right,
    CommPhase.NODES: _nodes,
    CommPhase.SPEED: _speed,
    CommPhase.DEEPSPEED: _deepspeed,
}
