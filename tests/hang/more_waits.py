"""More of what own_waits.py has: thought of after those had been mended, to see what the watch says of what is new to it again."""

import concurrent.futures
import logging
import multiprocessing
import os
import select
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOR_EVER = 3600


def database(engine, here, given):
    """Another connection has the lock of its file."""
    path = str(Path(given.folder, "runs.db"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    sqlite3.connect(path, timeout=FOR_EVER).execute("CREATE TABLE losses (value REAL)")


def fetch():
    time.sleep(FOR_EVER)


def future(engine, here, given):
    concurrent.futures.ThreadPoolExecutor(1).submit(fetch).result()


def thread_barrier(engine, here, given):
    threading.Barrier(2).wait()


def unix_socket(engine, here, given):
    """A service of this host takes the question and never answers."""
    path = str(Path(given.folder, "service"))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(path)
    asking.makefile().readline()


def other_dtype(engine, here, given):
    dist.all_reduce(torch.ones(64, dtype=torch.float64 if here else torch.float32))


def other_root(engine, here, given):
    """Each waits for what another rank is to send."""
    dist.broadcast(torch.ones(64), src=(given.on + 1) % dist.get_world_size() if here else given.on)


def saves_to_pipe(engine, here, given):
    """A storage client that reads the checkpoint from a named pipe is not there."""
    path = Path(given.folder, "model.pt")
    os.mkfifo(path)
    torch.save(engine.module.state_dict(), path)


def manager(engine, here, given):
    with multiprocessing.get_context("fork").Manager() as server:
        server.Queue().get()


def later_receive(engine, here, given):
    work = dist.irecv(torch.empty(4), src=(dist.get_rank() + 1) % dist.get_world_size())
    work.wait()


def later_reduce(engine, here, given):
    work = dist.all_reduce(torch.ones(64), async_op=True)
    work.wait()


def two_pipes(engine, here, given):
    """Each of two processes writes, and neither reads."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(b"x" * (1 << 20))


def destroys(engine, here, given):
    dist.destroy_process_group()
    time.sleep(FOR_EVER)


def logs(engine, here, given):
    handler = logging.StreamHandler(sys.stderr)
    log = logging.getLogger("own")
    log.addHandler(handler)
    threading.Thread(target=handler.acquire, daemon=True).start()
    time.sleep(0.2)
    log.warning("the loss is high")


def selects(engine, here, given):
    one, _ = socket.socketpair()
    select.select([one], [], [])


MORE_WAITS = {
    "database": database,
    "future": future,
    "thread_barrier": thread_barrier,
    "unix_socket": unix_socket,
    "other_dtype": other_dtype,
    "other_root": other_root,
    "saves_to_pipe": saves_to_pipe,
    "manager": manager,
    "later_receive": later_receive,
    "later_reduce": later_reduce,
    "two_pipes": two_pipes,
    "destroys": destroys,
    "logs": logs,
    "selects": selects,
}
MORE_EVERYWHERE = {"other_dtype", "other_root"}
