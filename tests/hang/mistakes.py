"""What goes wrong in ``train.py``, by kind: called with the engine, whether this is the rank of the mistake, and the arguments."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

WIDTH = 16


def skipped_step(engine, here, given):
    return "skip"


def save_alone(engine, here, given):
    engine.save_checkpoint(given.folder)


def other_collective(engine, here, given):
    values = torch.ones(64)
    if here:
        dist.all_gather([torch.empty(64) for _ in range(dist.get_world_size())], values)
    else:
        dist.all_reduce(values)


def other_shape(engine, here, given):
    dist.all_reduce(torch.ones(10 if here else 1000))


def swallowed(engine, here, given):
    try:
        raise ValueError("a bad sample")
    except ValueError:
        return "skip"


def exit_0(engine, here, given):
    sys.exit(0)


def exit_early(engine, here, given):
    os._exit(0)


def stopped(engine, here, given):
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(engine, here, given):
    os.kill(os.getpid(), signal.SIGKILL)


def interpreter(engine, here, given):
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def lock(engine, here, given):
    held = threading.Lock()
    held.acquire()
    thread = threading.Thread(target=held.acquire, daemon=True)
    thread.start()
    held.acquire()


def handled(engine, here, given):
    """A bad batch, and whatever is done about it takes for ever."""
    try:
        raise ValueError("a bad sample")
    except ValueError:
        time.sleep(3600)


def uneven(engine, here, given):
    """This rank has fewer batches than the others."""
    return "end"


def joins(engine, here, given):
    thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
    thread.start()
    thread.join()


def server(engine, here, given):
    """A server takes the question and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    asking = socket.create_connection(listening.getsockname())
    asking.recv(1)


def waits_for_child(engine, here, given):
    with subprocess.Popen(["sleep", "3600"], preexec_fn=end_with_this) as child:
        child.wait()


def end_with_this() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def group_alone(engine, here, given):
    dist.new_group(list(range(dist.get_world_size())))


def other_order(engine, here, given):
    """Two groups, whose collectives one rank calls the other way round."""
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    for group in reversed(groups) if here else groups:
        dist.all_reduce(torch.ones(4), group=group)


def receives(engine, here, given):
    """Of a rank that sends nothing."""
    dist.recv(torch.empty(4), src=(dist.get_rank() + 1) % dist.get_world_size())


def unused(engine, here, given):
    """DistributedDataParallel, and one rank leaves a layer out."""
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = torch.nn.parallel.DistributedDataParallel(Chosen(layers, 1 if here else 2))
    model(torch.ones(1, WIDTH)).sum().backward()


class Chosen(torch.nn.Module):
    def __init__(self, layers, count) -> None:
        super().__init__()
        self.layers, self.count = layers, count

    def forward(self, values):
        for layer in self.layers[: self.count]:
            values = layer(values)
        return values


def experts(engine, here, given):
    engine.module[0].both = True


def evaluates_alone(engine, here, given):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(1, WIDTH))
    engine.train()


def sleeps(engine, here, given):
    time.sleep(3600)


def pipe(engine, here, given):
    reading, _ = os.pipe()
    os.read(reading, 1)


def stale_lock(engine, here, given):
    """As torch does when a launch that was killed while it compiled has left its lock."""
    if here:
        path = Path(given.folder, "fused_adam", "lock")
        path.parent.mkdir()
        path.touch()
        FileBaton(str(path)).wait()
    dist.barrier()


def full_disk(engine, here, given):
    engine.save_checkpoint(given.folder)


def full_disk_swallowed(engine, here, given):
    try:
        if here:
            with Path(given.folder, "model.bin").open("wb") as file:
                file.write(b"x" * (64 << 20))
        dist.barrier()
    except OSError:
        return "skip"


def frozen_disk(engine, here, given):
    """A file system that takes nothing any more: as a network file system whose server is away."""
    subprocess.run(["fsfreeze", "--freeze", given.folder], check=True)
    Path(given.folder, "model.bin").write_bytes(b"x" * 4096)


def evaluate_on_one(engine, here, given):
    if here:
        model, until = torch.nn.Linear(WIDTH, 1), time.monotonic() + given.seconds
        while time.monotonic() < until:
            for number in range(50):
                model(torch.ones(1, WIDTH) * number)
            len(sorted(str(number) for number in range(1000)))
    dist.barrier()


def slow_step(engine, here, given):
    time.sleep(given.seconds)


def slow_save(engine, here, given):
    if here:
        until = time.monotonic() + given.seconds
        with Path(given.folder, "slow.bin").open("wb") as file:
            while time.monotonic() < until:
                file.write(os.urandom(1 << 20))
                file.flush()
                time.sleep(0.3)
                file.seek(0)
    dist.barrier()


def long_first_step(engine, here, given):
    """As torch.compile at first: each rank for itself, one for longer."""
    until = time.monotonic() + given.seconds / (1 if here else 2)
    while time.monotonic() < until:
        compile("\n".join(f"a{number} = {number}" for number in range(3000)), "x", "exec")


def compiler(engine, here, given):
    """One rank builds an extension, and only its compiler works."""
    if here:
        subprocess.run(["timeout", str(given.seconds), "sh", "-c", "while :; do :; done"], check=False)
    dist.barrier()


def long_compilation(engine, here, given):
    until = time.monotonic() + given.seconds
    while time.monotonic() < until:
        compile("\n".join(f"a{number} = {number}" for number in range(3000)), "x", "exec")


MISTAKES = {
    "skipped_step": skipped_step,
    "save_alone": save_alone,
    "other_collective": other_collective,
    "other_shape": other_shape,
    "swallowed": swallowed,
    "exit_0": exit_0,
    "exit_early": exit_early,
    "stopped": stopped,
    "killed": killed,
    "interpreter": interpreter,
    "lock": lock,
    "handled": handled,
    "uneven": uneven,
    "joins": joins,
    "server": server,
    "waits_for_child": waits_for_child,
    "group_alone": group_alone,
    "other_order": other_order,
    "receives": receives,
    "unused": unused,
    "experts": experts,
    "evaluates_alone": evaluates_alone,
    "sleeps": sleeps,
    "pipe": pipe,
    "stale_lock": stale_lock,
    "full_disk": full_disk,
    "frozen_disk": frozen_disk,
    "full_disk_swallowed": full_disk_swallowed,
    "evaluate_on_one": evaluate_on_one,
    "slow_step": slow_step,
    "slow_save": slow_save,
    "long_compilation": long_compilation,
    "long_first_step": long_first_step,
    "compiler": compiler,
}
EVERYWHERE = {
    "other_order",
    "unused",
    "other_collective",
    "other_shape",
    "stale_lock",
    "full_disk",
    "full_disk_swallowed",
    "evaluate_on_one",
    "slow_step",
    "slow_save",
    "long_compilation",
    "long_first_step",
    "compiler",
}
"""What every rank calls; the planted rank does another thing in it."""
