"""Opens the board: serve the store (rank 0 without torchrun) or connect to it, within our own time limits.

torch does not keep its own limits: connecting takes twice the timeout asked for, and with another program on the port a client
waits for ever. So plain TCP is tried first, and torch is called in a thread that may be abandoned.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.comm.mesh.connect import ask_listener, connect
from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous.board import Board, TcpStore
from dsdoctor.comm.results import ConnectOutcome

RETRY = 0.2
CONNECT = 3.0
ANSWER = 6.0
"""Seconds in which a store that listens must answer a client."""
FOUND = (ConnectOutcome.SILENT, ConnectOutcome.STRANGER)


@dataclass(frozen=True, kw_only=True)
class Unreached:
    """Why there is no store. ``taken``: the port was taken when rank 0 wanted to serve on it. ``listener`` is the process
    that listens there, where it is one of this user on this host; ``banner`` what it sent. ``token_missing``: a store
    answers, and no rank 0 of this test has written to it."""

    outcome: ConnectOutcome
    seconds: float
    taken: bool = False
    listener: str | None = None
    banner: str = ""
    token_missing: bool = False
    detail: str = ""


def open_board(rank: Rank, seconds: float) -> Board | Unreached:
    """The board of this test: rank 0 makes its prefix known to the others under the name of the run."""
    began = time.monotonic()
    store = _serve(rank) if rank.rank == 0 and not rank.agent_store else None
    if isinstance(store, Unreached) and not store.taken:
        return store
    if isinstance(store, Unreached) or store is None:
        # the port may be taken by a second rank 0; joining as a client makes both visible
        taken = isinstance(store, Unreached)
        store = _reach(rank, min(seconds, ANSWER) if taken else seconds, taken=taken)
        if isinstance(store, Unreached):
            return store
        return _find(store, rank, seconds - (time.monotonic() - began), first=rank.rank == 0 and not taken)
    return _find(store, rank, seconds, first=True)


def _find(store: TcpStore, rank: Rank, seconds: float, *, first: bool) -> Board | Unreached:
    """The board of a store: rank 0 writes the random prefix, the others wait for it."""
    name = f"dsdoctor-comm/{rank.run}/token"
    if first and store.add(f"{name}/n", 1) == 1:
        token = secrets.token_hex(8)
        store.set(name, token)
        return Board(store, f"dsdoctor-comm/{token}", ours=True)
    until = time.monotonic() + max(seconds, 1.0)
    while not store.check([name]):
        if time.monotonic() > until:
            return Unreached(outcome=ConnectOutcome.SILENT, seconds=seconds, token_missing=True)
        time.sleep(0.05)
    return Board(store, f"dsdoctor-comm/{store.get(name).decode()}")


def _serve(rank: Rank) -> "TcpStore | Unreached":
    """Listen on the master's address where that is one of this host's, else on all."""
    listening = socket.socket(socket.AF_INET6 if ":" in rank.master else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind((rank.master, rank.port))
        except OSError as error:
            if isinstance(error, socket.gaierror):
                return Unreached(outcome=ConnectOutcome.NO_NAME, seconds=0.0)
            # a service's or a translated address does not belong to this host
            if error.errno == errno.EADDRINUSE:
                return Unreached(outcome=ConnectOutcome.STRANGER, seconds=0.0, taken=True)
            listening.bind(("", rank.port))
        listening.listen(2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return Unreached(outcome=ConnectOutcome.STRANGER, seconds=0.0, taken=taken, detail=error.strerror or str(error))
    handle = os.dup(listening.fileno())
    listening.close()
    return _torch_store(rank, handle, ANSWER) or Unreached(outcome=ConnectOutcome.SILENT, seconds=ANSWER)


def _reach(rank: Rank, seconds: float, *, taken: bool) -> "TcpStore | Unreached":
    """Connect as a client, as soon as the port is open."""
    began, outcomes = time.monotonic(), Counter[ConnectOutcome]()
    while time.monotonic() - began < seconds:
        left = seconds - (time.monotonic() - began)
        opened = connect(rank.master, rank.port, timeout=min(CONNECT, max(left, 0.2)))
        if not isinstance(opened, ConnectOutcome):
            opened.close()
            store = _torch_store(rank, None, min(ANSWER, max(left, 1.0)))
            if store is not None:
                return store
            heard = ask_listener(rank.master, rank.port)
            return Unreached(
                outcome=heard.outcome, seconds=time.monotonic() - began, taken=taken, banner=heard.banner,
                listener=listener_of(rank.port),
            )  # fmt: skip
        outcomes[opened] += 1
        time.sleep(RETRY)
    # the time limit may have cut the last attempt short, so the most frequent outcome counts
    outcome = outcomes.most_common(1)[0][0] if outcomes else ConnectOutcome.TIMED_OUT
    return Unreached(outcome=outcome, seconds=time.monotonic() - began, taken=taken)


def _torch_store(rank: Rank, handle: int | None, seconds: float) -> TcpStore | None:
    """torch's store, None where it does not answer in time. torch raises another type in each release."""
    return bounded(lambda: _open(rank, handle), seconds, (Exception,))


def _open(rank: Rank, handle: int | None) -> TcpStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=30)}
    if handle is not None:
        options["master_listen_fd"] = handle
    store = TCPStore(rank.master, rank.port, None, handle is not None, **options)
    # a client's constructor accepts any listener; only an answer proves that it is a store
    store.add("dsdoctor-comm/probe", 0)
    return cast(TcpStore, store)


def listener_of(port: int) -> str | None:
    """Who listens on a port of this host, where it is a process that this user may look at."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f"pid {one.pid} ({' '.join(psutil.Process(one.pid).cmdline())[:60]})"
    return None
