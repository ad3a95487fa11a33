"""Rank processes without their start: this process has imported torch and dsdoctor once, and what it starts as
``python -m MODULE`` is a fork of it.

Inside of ``forking()`` every subprocess.Popen of this process and of its forks whose program is this interpreter, and whose
module is one of MODULES, forks where it would execute: pipes, folder, session and variables are those that Popen was given. The
process tree, the signals and every line of the test are so those of a real start; what is left out is importing. ``unshare
--net`` and ``nsenter`` before the interpreter are done by system calls. Where a sitecustomize of PYTHONPATH changes modules that
are imported already, they are changed at the start.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MODULES = ("dsdoctor", "dsdoctor.comm", "dsdoctor.comm.launch.on_host", "torch.distributed.run")
IMPORTED = (
    "torch.distributed",
    "torch.distributed.run",
    "dsdoctor.cli.app",
    "dsdoctor.cli.comm",
    "dsdoctor.comm.control.agent",
    "dsdoctor.comm.control.supervisor",
    "dsdoctor.comm.launch.on_host",
)
NEW_NET = 0x40000000
SPACES = {"net": NEW_NET, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000, "pid": 0x20000000}
"""The namespaces that nsenter enters for a rig's node; the mounts go late, for /proc is another after that."""
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process to be: the module and its arguments, what stands before the interpreter, where it runs, and variables beside those
    that it is given."""

    module: str
    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()
    folder: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def start_of(argv: object) -> Start | None:
    """What a command line starts, where that can be a fork; None for every other program.

    >>> start_of([sys.executable, "-u", "-m", "dsdoctor", "comm"]).module
    'dsdoctor'
    >>> start_of(["sh", "-c", "true"]), start_of([sys.executable, "-m", "pip"]), start_of("python -m dsdoctor")
    (None, None, None)
    """
    if not isinstance(argv, (list, tuple)) or sys.executable not in argv:
        return None
    place = argv.index(sys.executable)
    before, rest = tuple(argv[:place]), list(argv[place + 1 :])
    while rest and rest[0] == "-u":
        del rest[0]
    if len(rest) < 2 or rest[0] != "-m" or rest[1] not in MODULES or (before and before[0] not in ENTRIES):
        return None
    return Start(before=before, module=rest[1], arguments=tuple(rest[2:]))


def start_over_ssh(argv: object) -> Start | None:
    """What ssh starts on a host that is this machine, where its command is of the form that ``remote_command`` gives it."""
    if not isinstance(argv, list) or argv[0] != "ssh" or not argv[-1].startswith("exec sh -c "):
        return None
    folder, variables = "", [("NAME", argv[-2])]
    for line in shlex.split(argv[-1])[-1].splitlines():
        first, *words = shlex.split(line)
        if first == "cd":
            folder = words[0]
        elif first == "export":
            name, _, value = words[0].partition("=")
            variables.append((name, value))
        else:
            found = start_of(words) if first == "exec" else None
            return found and replace(found, folder=folder, variables=tuple(variables))
    return None


def prepare() -> None:
    """Import what all ranks need. Nothing of it may have started a thread: a fork has none of them."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names only
    if threads != 1 or threading.active_count() != 1:
        raise RuntimeError(f"{threads} threads run: this process cannot be forked")
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Lets subprocess fork as told above, also by the name that torchrun has of it, and ClusterShell's own Popen."""
    from ClusterShell.Worker import EngineClient, fastsubprocess
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    real = subprocess.Popen

    class Forking(real):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, args: Any, *more: Any, **named: Any) -> None:
            start = start_of(args)
            if start is not None:
                environment = named.get("env")
                given = dict(os.environ if environment is None else environment)
                named["preexec_fn"] = lambda: become(start, given)
            super().__init__(args, *more, **named)

    def fast(args: Any, *more: Any, **named: Any) -> Any:
        start = start_over_ssh(args)
        if start is not None:
            named["preexec_fn"] = lambda: become(start, os.environ.copy())
        return fastsubprocess.Popen(args, *more, **named)

    subprocess.Popen = subprocess_handler.Popen = Forking  # type: ignore[misc]
    EngineClient.Popen = fast
    try:
        yield
    finally:
        subprocess.Popen = subprocess_handler.Popen = real  # type: ignore[misc]
        EngineClient.Popen = fastsubprocess.Popen


def become(start: Start, environment: Mapping[str, str]) -> NoReturn:
    """Be that process, in the child that Popen has forked; it never comes to execute anything."""
    try:
        _like_new({**environment, **dict(start.variables)})
        os.chdir(start.folder or ".")
        if start.before:
            ENTRIES[start.before[0]](start.before)
        _close_inherited()
        _customize(environment.get("PYTHONPATH", ""))
        sys.argv = [start.module, *start.arguments]
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        _leave(0)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        _leave(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except KeyboardInterrupt:
        _leave(130)
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _leave(status: int) -> NoReturn:
    """End as an interpreter does, but for the objects of the process that was forked: their threads are not here."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _close_inherited() -> None:
    """Close what an executed program would not have, Popen's own pipe too. A pipe that has both of its ends here is libuv's, which
    torchrun's store uses: it closes these two by their numbers in each fork, whatever they are then."""
    handles = dict[int, str]()
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            handles[int(place.name)] = str(place.readlink())
    for number, what in handles.items():
        if number > 2 and not (what.startswith("pipe:") and list(handles.values()).count(what) > 1):
            with contextlib.suppress(OSError):
                os.close(number)


def _like_new(environment: Mapping[str, str]) -> None:
    """What a started interpreter would not have of this one."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    gc.enable()
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(
            number, "w", encoding="utf-8", errors="backslashreplace" if number == 2 else "strict", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)


def _alone(before: Sequence[str]) -> None:
    """unshare --net sh -c SCRIPT: a network of its own, in which the script does its part."""
    _called(LIBC.unshare(NEW_NET))
    subprocess.run([*before[2:], "true"], check=True)


def _inside(before: Sequence[str]) -> None:
    """nsenter --target PID ... sh -c 'cd ...' FOLDER: the namespaces of a node. As with nsenter, this process waits for the one
    that is in all of them."""
    pid, folder = before[before.index("--target") + 1], before[-1]
    handles = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in SPACES}
    for name, kind in SPACES.items():
        _called(LIBC.setns(handles[name], kind))
    os.chdir(folder)
    if child := os.fork():
        os.closerange(3, 4096)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)


ENTRIES: dict[str, Callable[[Sequence[str]], None]] = {"unshare": _alone, "nsenter": _inside}


def _called(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _customize(search_path: str) -> None:
    """Do what an interpreter does with PYTHONPATH and the first sitecustomize there, and change what is imported already."""
    folders = [folder for folder in search_path.split(":") if folder]
    sys.path[:0] = folders
    found = next((path for folder in folders if (path := Path(folder) / "sitecustomize.py").exists()), None)
    if found is None:
        return
    spec = importlib.util.spec_from_file_location("sitecustomize", found)
    assert spec and spec.loader
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changes = getattr(module, "CHANGES", {})
    for name in [name for name in changes if name in sys.modules]:
        for change in changes[name]:
            _change(sys.modules[name], change)


def _change(module: ModuleType, change: Callable[[ModuleType], None]) -> None:
    """Change a module, and what others have imported from it by ``from module import *``."""
    old = dict(vars(module))
    change(module)
    changed = {name for name, value in vars(module).items() if name in old and old[name] is not value}
    for other in [
        each for name, each in sys.modules.items() if name.startswith("torch.distributed") and each is not None
    ]:
        for name in changed:
            if vars(other).get(name) is old[name]:
                setattr(other, name, vars(module)[name])
