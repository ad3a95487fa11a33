"""Who listens at an address and port; and a rank that cannot come says why, in the store of rank 0.

A notice counts only for a rank of this run that does not come by itself, and of jobs started by hand, which have no name, only with
the same MASTER_PORT: another port may be another job's, so such a notice is only told where that rank is missing. Rank 0 serves
its store on one of the three ports above the master's too: there it hears of a rank with another MASTER_PORT, and where torchrun's
agent has the master's. Rank 0 closes the connection by ending: a launcher that ends all ranks with the first must not do so before
rank 0 has reported.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from dsdoctor.comm.mesh.mesh import connect
from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous.tcp_store import NONCE, PROBE, StoreClient
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.text import decode

# Address and port -> a store of torch, or somebody else. Asked over plain TCP: torch's client cannot tell, for with another
# program on the port it waits for ever.


MAX_ANSWER_BYTES = 4096
RANK_ZERO = "dsdoctor-comm/rank-zero"


@dataclass(frozen=True, kw_only=True)
class RankZero:
    """Whose store it is that rank 0 of a test serves: its run, the number of ranks, its MASTER_PORT and its process."""

    run: str
    world: int
    port: int
    host: str
    pid: int


def rank_zero_at(store: StoreClient) -> RankZero | None:
    """Who serves a store, where that is rank 0 of a test; torchrun's agent does not say."""
    with contextlib.suppress(msgspec.MsgspecError):
        return decode(store.get(RANK_ZERO), RankZero) if store.check([RANK_ZERO]) else None
    return None


@dataclass(frozen=True, kw_only=True)
class Listener:
    """What answers on a port. REACHED: a store of torch; STRANGER: what sent ``said``, or closed the connection; SILENT: what
    accepts and sends nothing. ``here``: the connection stayed on this host."""

    outcome: ConnectOutcome
    said: str = ""
    here: bool = False


def ask(address: str, port: int, *, timeout: float, listen: float) -> Listener:
    """Who listens there: ``timeout`` seconds to connect, ``listen`` seconds to answer."""
    opened = connect(address, port, timeout=timeout)
    if isinstance(opened, ConnectOutcome):
        return Listener(outcome=opened)
    with opened:
        try:
            here = opened.getsockname()[0] == opened.getpeername()[0]
            opened.sendall(PROBE)
            answer = _answer(opened, listen)
        except TimeoutError:
            return Listener(outcome=ConnectOutcome.SILENT, here=here)
        except OSError:
            return Listener(outcome=ConnectOutcome.STRANGER)
    if answer == NONCE:
        return Listener(outcome=ConnectOutcome.REACHED, here=here)
    said = answer[:80].decode("ascii", errors="replace").strip()
    return Listener(outcome=ConnectOutcome.STRANGER, said=said if said.isprintable() else "", here=here)


def _answer(opened: socket.socket, seconds: float) -> bytes:
    """What comes up to the end of a line. Raises TimeoutError where nothing comes."""
    until, text = time.monotonic() + seconds, b""
    while b"\n" not in text and len(text) < MAX_ANSWER_BYTES:
        opened.settimeout(max(until - time.monotonic(), 0.01))
        try:
            part = opened.recv(MAX_ANSWER_BYTES)
        except TimeoutError:
            if not text:
                raise
            break
        if not part:
            break
        text += part
    return text


PORTS = 3
CONNECT = 0.5
"""Seconds for a connection: who waits for one looks after ranks meanwhile."""
RETRY, AFTER_NOTICE = 0.3, 1.5
"""Seconds between two attempts; and from the end of rank 0, which has reported that a rank cannot come, to the end of that rank."""
UNNAMED = "0"
"""The run of a job that no launcher has named."""
NOTICES = "dsdoctor-comm/notices"
MAX_NOTICE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Why a rank of a run cannot come. ``port`` is its MASTER_PORT."""

    run: str
    rank: int
    host: str
    why: str
    port: int = 0


def ports(master_port: int) -> tuple[int, ...]:
    """Where rank 0 may serve its store beside the master's port.

    >>> ports(29500)
    (29501, 29502, 29503)
    """
    return tuple(port for port in range(master_port + 1, master_port + 1 + PORTS) if port < 1 << 16)


class Notices:
    """The notices that rank 0 finds in the stores that lead to it; of each rank the first."""

    def __init__(self, rank: Rank, stores: Sequence[StoreClient] = ()) -> None:
        self._rank, self._read = rank, dict.fromkeys(stores, 0)
        self.heard: dict[int, Notice] = {}
        self.perhaps: dict[int, Notice] = {}

    def look(self) -> None:
        """Read what is new. ``perhaps``: those of ranks with another MASTER_PORT, of this job or of another one."""
        for store, read in self._read.items():
            while read < store.add(f"{NOTICES}/n", 0) and store.check([f"{NOTICES}/{read + 1}"]):
                read += 1
                # the store is open to whoever reaches its port
                with contextlib.suppress(msgspec.MsgspecError):
                    self._hear(decode(store.get(f"{NOTICES}/{read}")[:MAX_NOTICE_BYTES], Notice))
            self._read[store] = read

    def _hear(self, notice: Notice) -> None:
        if notice.run == self._rank.run and 0 <= notice.rank < self._rank.world:
            ours = notice.run != UNNAMED or notice.port == self._rank.port
            (self.heard if ours else self.perhaps).setdefault(notice.rank, notice)


def send_notice(master: str, port: int, notice: Notice, *, seconds: float, stay: float = 0.0) -> bool:
    """Tell rank 0, at the master's address and port, why a rank cannot come, again until a store takes it or the time is over;
    whether one did. Then wait until rank 0 has ended, for ``stay`` seconds at most."""
    text = msgspec.json.encode(replace(notice, why=notice.why[: MAX_NOTICE_BYTES // 2]))
    until = time.monotonic() + seconds
    while True:
        for listening in (port, *ports(port)):
            with contextlib.suppress(OSError, UnicodeError):
                if _is_taken(master, listening, text, stay):
                    return True
        if time.monotonic() + RETRY > until:
            return False
        time.sleep(RETRY)


def _is_taken(master: str, port: int, text: bytes, stay: float) -> bool:
    """Whether a store there takes a notice. Raises OSError where none answers."""
    with contextlib.closing(StoreClient(master, port, timeout=CONNECT)) as store:
        number = store.add(f"{NOTICES}/n", 1)
        store.set(f"{NOTICES}/{number}", text)
        taken = store.check([f"{NOTICES}/{number}"])
        if taken and stay > 0:
            # rank 0 ends, and its store with it; that of an agent stays
            with contextlib.suppress(OSError):
                store.wait(f"{NOTICES}/over", stay)
            time.sleep(AFTER_NOTICE)
        return taken
