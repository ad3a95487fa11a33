"""A rank whose watching thread is listened to: which modules it imports, which functions it runs, and whether it goes on while the
script holds the locks of Python's own modules. Prints what was found as JSON.

`audited.py FOLDER planted`: with a torch of a few lines. `torch`: with the real one, whose compiler is imported slowly. `stop`: the
rank is to end.
"""

import _imp
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import own_classes

from dsdoctor.core.script import unlisted_idents
from dsdoctor.hang import inspection, sampler, start
from dsdoctor.hang.models import HangOptions
from dsdoctor.ranks import flight_recorder
from dsdoctor.ranks.failure import read_failure
from dsdoctor.run.hang import ENTRY

LIMIT = 60.0
FILES = (sampler.__file__, inspection.__file__, flight_recorder.__file__)
imports: list[str] = []
ran: set[str] = set()
of_script: set[str] = set()
watching: list[int] = []


def note_import(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import" and threading.get_ident() in watching:
        imports.append(str(arguments[0]))


def note_call(frame: Any, event: str, _: object) -> None:
    if frame.f_code.co_filename in FILES:
        ran.add(frame.f_code.co_name)
    elif event == "call" and frame.f_code.co_filename == own_classes.__file__:
        of_script.add(f"{frame.f_code.co_name}, asked at {frame.f_back and frame.f_back.f_lineno}")


class Loud(ValueError):
    """An exception whose message imports."""

    def __str__(self) -> str:
        import colorsys  # noqa: F401

        return "loud"


def wait_for(what: Any) -> None:
    last = time.monotonic() + LIMIT
    while not what():
        if time.monotonic() > last:
            raise TimeoutError
        time.sleep(0.02)


class Watched:
    """The watch of this process, with the thread listened to."""

    def __init__(self) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(os.getpid()), TORCHELASTIC_RUN_ID="audited")
        sys.addaudithook(note_import)
        self.begun = start.Beginning(HangOptions(after=3.0, folder=sys.argv[1]), ENTRY, rank=0, world=2)
        self.sampler = self.begun.sampler
        tend = self.sampler._tend
        # within the thread, which the hooks of `threading` do not reach, and in each look anew
        self.sampler._tend = lambda: sys.setprofile(note_call) or tend()  # type: ignore[func-returns-value]
        wait_for(unlisted_idents)
        watching.extend(unlisted_idents())

    def looks(self) -> int:
        return int(self.sampler._ring._number)

    def look_on(self) -> None:
        """Let it look a few times more."""
        number = self.looks() + 4
        wait_for(lambda: self.sampler._wake.set() or self.looks() >= number)

    def stall(self) -> None:
        """Nothing has moved for long."""
        self.sampler._moved = -1000.0
        self.look_on()


class Group(list[None]):
    """Counts in C, as torch's own do: what is a function of Python is the script's, and not called."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    _get_sequence_number_for_group = list.__len__


def entry(number: int) -> dict[str, Any]:
    frames = [{"filename": "/a/train.py", "line": 3, "name": "main"}]
    told = {
        "process_group": ["0", ""],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
    }
    told |= {"time_created_ns": 10**9 * number, "input_sizes": [[4]], "state": "scheduled", "frames": frames}
    return {**told, "thread_id": str(threading.main_thread().ident)}


def plant_torch() -> Group:
    import pickle

    group = Group([None])
    world = types.SimpleNamespace(pg_names={group: "0"}, pg_group_ranks={group: {0: 0, 1: 1}}, default_pg=group)
    entries = {"entries": [entry(number) for number in range(1, 5)]}
    recorder = {
        "_dump_fr_trace_json": lambda: json.dumps(entries).encode(),
        "_dump_fr_trace": lambda: pickle.dumps(entries, protocol=2),
    }
    planted = {
        "torch": {},
        "torch._C": {"_distributed_c10d": types.SimpleNamespace(**recorder)},
        "torch.distributed.distributed_c10d": {"_world": world},
        "torch.cuda": {},
    }
    for name, values in planted.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    return group


def stands_in(file: str, wait: Any, **values: Any) -> None:
    """Call a function from a line of another file, as torch's own code does."""
    scope = {**values, "act": wait}
    source = f"def wait({', '.join(values) or '_=0'}):\n    act()\n"
    exec(compile(source, file, "exec"), scope)
    scope["wait"](**values)


def all_paths(watched: Watched) -> None:
    threading.Thread(target=wait_for, args=(lambda: False,), daemon=True).start()
    # as the event loop of an actor, while another thread trains
    stands_in("/v/asyncio/base_events.py", functools.partial(time.sleep, 2.5))
    group, look = plant_torch(), watched.look_on
    watched.sampler.engine = types.SimpleNamespace(global_steps=1)
    look()
    watched.sampler._arrivals._number = 0
    look()
    try:
        raise Loud("seven", 7)
    except Loud:
        watched.stall()
    watched.sampler._recorded = None
    # the compiler is there
    sys.modules["torch"]._inductor = None  # type: ignore[attr-defined]
    stands_in("/v/torch/utils/file_baton.py", watched.stall, self=types.SimpleNamespace(lock_file_path="/x"))
    stands_in("/v/torch/distributed/distributed_c10d.py", watched.stall, src=1, group=None)
    stands_in("/v/torch/distributed/rendezvous.py", watched.stall, hostname="localhost", port=1)
    worker = types.SimpleNamespace(_popen=types.SimpleNamespace(pid=1, method="fork"))
    loader = types.SimpleNamespace(_workers=[worker], _worker_init_fn=None)
    stands_in("/v/torch/utils/data/dataloader.py", watched.stall, self=loader)
    with_own_classes(watched, group)
    reading, writing = os.pipe()
    threading.Timer(3.0, os.write, (writing, b"x")).start()
    watched.sampler._moved = -1000.0
    os.read(reading, 1)
    group.append(None)
    Path(watched.sampler._words).write_text("dsdoctor: planted words\n")
    wait_for(lambda: not Path(watched.sampler._words).exists())
    # a sample that does not fit
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    world.pg_group_ranks[group] = dict.fromkeys(range(30_000), 0)
    watched.stall()
    watched.sampler.failed(read_failure(ValueError("printed, and it goes on")))
    look()
    group.append(None)
    look()
    # the thread that made the groups has ended
    maker, made = threading.Thread(target=bool), watched.sampler._maker
    maker.start()
    maker.join()
    watched.sampler._maker = maker.ident
    look()
    watched.sampler._maker = made
    sys.last_value = Loud()


def with_own_classes(watched: Watched, group: Group) -> None:
    """The same ways again, and all that is met on them is of the script's own classes."""
    number = len(group)
    watched.sampler.engine = own = own_classes.engine()
    watched.look_on()
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    world.pg_names = {own_classes.PythonGroup(): "9", **world.pg_names}
    sys.modules["lazy"] = own_classes.lazy_module()
    worker = own_classes.Worker(target=wait_for, args=(lambda: len(group) > number,))
    worker.start()
    for error in (own_classes.Failure(3, "three"), own_classes.Message(5, "five", own_classes.Number(5))):
        try:
            raise error
        except OSError:
            watched.stall()
    with contextlib.suppress(StopIteration):
        raise StopIteration(watched.stall())
    stands_in("/v/torch/utils/file_baton.py", watched.stall, self=own_classes.Baton())
    stands_in("/v/torch/distributed/distributed_c10d.py", watched.stall, **own_classes.values())
    stands_in("/v/torch/utils/data/dataloader.py", watched.stall, self=own_classes.Iterator())
    loader = types.SimpleNamespace(_workers=[own_classes.Process()], _worker_init_fn=None)
    stands_in("/v/torch/utils/data/dataloader.py", watched.stall, self=loader)
    asked = [sampler.stored(own, "micro_steps") is not None, watched.sampler._engine_steps()]
    if asked != [True, (None, 7)]:
        raise ValueError(f"the engine's fields are {asked}")
    group.append(None)
    worker.join()
    watched.sampler.engine = types.SimpleNamespace(global_steps=1)


def stopped(watched: Watched) -> None:
    """Somebody asked for the end of all ranks, and the script does not end."""
    os._exit = lambda status: report() or ends(status)  # type: ignore[assignment,func-returns-value]
    Path(f"{watched.sampler._words}.stop").touch()
    while True:
        try:
            time.sleep(LIMIT)
        except sampler.HangDetected:
            continue


ends = os._exit


def report() -> None:
    print(json.dumps({"imports": imports, "ran": sorted(ran), "of_script": sorted(of_script)}), flush=True)


def hold_locks(watched: Watched) -> None:
    """It goes on while this thread holds what a script may hold."""
    import sysconfig

    held: list[Any] = [threading._active_limbo_lock, logging._lock]  # type: ignore[attr-defined]
    held += [lock] if (lock := getattr(sysconfig, "_CONFIG_VARS_LOCK", None)) is not None else []
    _imp.acquire_lock()
    for lock in held:
        lock.acquire()
    try:
        watched.stall()
    finally:
        for lock in held:
            lock.release()
        _imp.release_lock()


def with_torch(watched: Watched) -> None:
    """The real torch, whose optimizer imports its compiler, slowly, while nothing moves and torch's record is read."""
    import importlib.machinery

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    watched.look_on()
    load = importlib.machinery.SourceFileLoader.exec_module

    def slowly(self: Any, module: Any) -> None:
        if module.__name__.startswith(("torch._dynamo", "torch._inductor")):
            watched.sampler._recorded, watched.sampler._moved = None, -1000.0
            watched.sampler._wake.set()
            time.sleep(0.005)
        load(self, module)

    importlib.machinery.SourceFileLoader.exec_module = slowly  # type: ignore[method-assign]
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    watched.sampler._recorded = None
    watched.stall()
    # once torch's compiler is there the lines of the calls are told
    calls = watched.sampler._recorded or {}
    if not calls["0"]["operations"][-1]["place"]:
        raise ValueError("without lines")
    dist.destroy_process_group()
    watched.look_on()


def main() -> None:
    watched = Watched()
    {"planted": all_paths, "torch": with_torch, "stop": stopped}[sys.argv[2]](watched)
    hold_locks(watched)
    watched.sampler.close()
    report()


if __name__ == "__main__":
    main()
