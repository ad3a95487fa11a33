"""What one rank waits for by itself, in ``train.py``: kinds that were thought of after the watch was done, to see what it says of
what nobody had planned. Called as those of ``mistakes.py``."""

import asyncio
import atexit
import fcntl
import gc
import multiprocessing
import os
import pdb
import pty
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist

FOR_EVER = 3600


class Locked(torch.utils.data.Dataset):
    """Reads under a lock that another thread had when the worker was forked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def forked_lock(engine, here, given):
    data = Locked()
    data.lock.acquire()
    for _ in torch.utils.data.DataLoader(data, num_workers=1):
        data.lock.release()


class Stopped(Locked):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return index


def stopped_worker(engine, here, given):
    next(iter(torch.utils.data.DataLoader(Stopped(), num_workers=1)))


def asks(engine, here, given):
    _, ours = pty.openpty()
    os.dup2(ours, 0)
    sys.stdin = os.fdopen(0)
    input("go on? ")


def prints(engine, here, given):
    """Into a pipe that somebody has open and nobody reads."""
    _, writing = os.pipe()
    with os.fdopen(writing, "w") as log:
        while True:
            print("a line", file=log)


def in_handler(engine, here, given):
    """A signal comes while the lock is held that its handler wants, too."""
    held = threading.Lock()

    def save(number, frame):
        held.acquire()

    signal.signal(signal.SIGUSR1, save)
    with held:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)


def file_lock(engine, here, given):
    """The lock of a cache, which a process has that never ends."""
    from filelock import FileLock

    path = held_lock(given)
    with FileLock(path):
        pass


def flock(engine, here, given):
    with open(held_lock(given), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def held_lock(given) -> str:
    path = str(Path(given.folder, "cache.lock"))
    subprocess.Popen(["flock", path, "sleep", str(FOR_EVER)])
    time.sleep(0.5)
    return path


def debugger(engine, here, given):
    reading, _ = os.pipe()
    os.dup2(reading, 0)
    sys.stdin = os.fdopen(0)
    pdb.set_trace()


def runs(engine, here, given):
    subprocess.run(["sleep", str(FOR_EVER)], capture_output=True, check=False)


def fifo(engine, here, given):
    path = Path(given.folder, "fifo")
    os.mkfifo(path)
    with path.open() as file:
        file.read()


def some_make_group(engine, here, given):
    if not here:
        dist.new_group(list(range(dist.get_world_size())))


def objects_alone(engine, here, given):
    dist.all_gather_object([None] * dist.get_world_size(), {"loss": 1.0})


def sends(engine, here, given):
    dist.send(torch.ones(1 << 24), dst=(dist.get_rank() + 1) % dist.get_world_size())


def dead_thread(engine, here, given):
    """The thread that is to fill the queue has ended with an exception."""
    ready = queue.Queue()

    def fill():
        raise ValueError("a bad sample")

    threading.Thread(target=fill).start()
    ready.get()


def progress_bar(engine, here, given):
    from tqdm import tqdm

    bar = tqdm(total=10, mininterval=0, file=sys.stderr)
    threading.Thread(target=tqdm.get_lock().acquire, daemon=True).start()
    time.sleep(0.2)
    bar.update(1)


def event_loop(engine, here, given):
    async def never():
        await asyncio.Event().wait()

    asyncio.run(never())


def polls(engine, here, given):
    while not Path(given.folder, "ready").exists():
        time.sleep(0.5)


def killed_worker(engine, here, given):
    """A pool never notices that one of its processes was killed."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(os.kill, [])
        pool.apply(ends)


def ends():
    os.kill(os.getpid(), signal.SIGKILL)


def at_exit(engine, here, given):
    atexit.register(upload)
    sys.exit(0)


def upload():
    time.sleep(FOR_EVER)


def never_ends(engine, here, given):
    """A thread that is no daemon keeps the process alive after its script has ended."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    sys.exit(0)


def signal_wait(engine, here, given):
    signal.pause()


def page(engine, here, given):
    listening = socket.create_server(("127.0.0.1", 0))
    urllib.request.urlopen(f"http://127.0.0.1:{listening.getsockname()[1]}/")


def hook(engine, here, given):
    """Of the backward: the next one never ends."""
    next(engine.module.parameters()).register_hook(lambda _: time.sleep(FOR_EVER))


def collects(engine, here, given):
    """Garbage, for longer than --hang-after, and no Python runs meanwhile."""
    many = [[number] for number in range(4_000_000)]
    until = time.monotonic() + given.seconds
    while time.monotonic() < until:
        gc.collect()
    del many


def compiles(engine, here, given):
    """torch.compile on one rank, by the real compiler; the others wait."""
    if here:
        model = torch.nn.Sequential(*(torch.nn.Linear(8 + number, 9 + number) for number in range(4)), torch.nn.GELU())
        torch.compile(model)(torch.ones(2, 8)).sum().backward()
    dist.barrier()


OWN_WAITS = {
    "forked_lock": forked_lock,
    "stopped_worker": stopped_worker,
    "asks": asks,
    "prints": prints,
    "in_handler": in_handler,
    "file_lock": file_lock,
    "flock": flock,
    "debugger": debugger,
    "runs": runs,
    "fifo": fifo,
    "some_make_group": some_make_group,
    "objects_alone": objects_alone,
    "sends": sends,
    "dead_thread": dead_thread,
    "progress_bar": progress_bar,
    "event_loop": event_loop,
    "polls": polls,
    "killed_worker": killed_worker,
    "at_exit": at_exit,
    "never_ends": never_ends,
    "signal_wait": signal_wait,
    "page": page,
    "hook": hook,
    "collects": collects,
    "compiles": compiles,
}
OWN_EVERYWHERE = {"some_make_group", "compiles"}
