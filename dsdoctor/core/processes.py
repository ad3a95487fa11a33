"""Processes that we start: forks that die with their parent, the state of one, and the end of a whole session."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
STARTTIME = 19
"""Where the 22nd field of /proc/PID/stat stands behind the name."""
LETTERS = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device, and cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, and not reaped",
    "X": "dead",
}


def fork(main: Callable[[], None]) -> int:
    """Run ``main`` in a child that is killed when this process dies; returns its pid. Nothing of the parent's stack runs in
    the child: it leaves by ``os._exit`` with 0, with the status of a SystemExit, or 1 after an exception that is printed to
    its stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(parent)
        main()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (prctl(2)); a parent that is gone already ends it now."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def age() -> float:
    """Seconds since this process was started, imports and all, by the kernel's clock; 0 where it does not tell (proc(5))."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - int(stat.rpartition(")")[2].split()[STARTTIME]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def redirect(path: Path) -> None:
    """Send this process's stdout and stderr to a file, whatever writes to them."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def state_of(pid: int) -> str:
    """The kernel's letter for a process ("S", "T" ...), "" where there is none (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return parse_state(stat)


def parse_state(stat: str) -> str:
    """The third field of /proc/PID/stat; the second is a name in brackets that may hold anything.

    >>> parse_state("4711 (a) b) T 1 4711")
    'T'
    """
    return stat.rpartition(")")[2].strip()[:1]


def ending_of(status: int) -> str | None:
    """How a process died, in words, from its wait status; None for success.

    >>> ending_of(9), ending_of(256), ending_of(0)
    ('killed by SIGKILL', 'exit status 1', None)
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    code = os.WEXITSTATUS(status)
    return f"exit status {code}" if code else None


SWEEPS = 20
"""How often to look again: a process may fork while it is being ended."""


def end_session(session: int) -> None:
    """Kill every process of a session that we started: a member may have a process group of its own.

    The leader goes last: it waits for its children, and who else would reap them may take its time.
    """
    for _ in range(SWEEPS):
        members = [pid for pid in _pids() if _session_of(pid) == session and pid != session]
        if not members:
            break
        for pid in members:
            _kill(os.kill, pid)
    _kill(os.killpg, session)


def _pids() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)
