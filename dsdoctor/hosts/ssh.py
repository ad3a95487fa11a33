"""One command on each of many hosts over ssh, all at the same time, through ClusterShell, which only this file imports.

The command's stdin stays open as long as this process lives and ``until`` is not true: what runs there can end with it.
"""

import resource
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsdoctor.core.errors import UsageError

LOOK = 0.05
EACH, OTHERS = 3, 64
"""Descriptors that a host takes (stdin, stdout, stderr), and those of this process for everything else."""


@dataclass(frozen=True, kw_only=True)
class HostCommand:
    """A command for the login shell of a host, as ssh names it."""

    host: str
    command: str


class Listener(Protocol):
    """Hears the hosts."""

    def line(self, host: str, text: str, *, error: bool) -> None:
        """A line of a host's stdout, or stderr."""

    def ended(self, host: str, status: int) -> None:
        """The command ended there, or ssh did (255); 128 and a signal's number where that killed ssh."""


def on_hosts(
    commands: Sequence[HostCommand],
    listener: Listener,
    *,
    ssh: Sequence[str],
    seconds: float,
    until: Callable[[], bool],
) -> None:
    """Run until all have ended, ``until`` is true or the time is up; whatever happens, no ssh is left.

    ``ssh``: the program and its options. Raises UsageError where this user may not open enough files.
    """
    _make_room(len(commands))
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
    from ClusterShell.Task import task_self

    task = task_self()
    _set(task, ssh, len(commands))
    for each in commands:
        nodes = NodeSet(each.host, resolver=RESOLVER_NOGROUP)
        task.shell(each.command, nodes=nodes, handler=_handler(listener), stderr=True, tree=False)
    limit = time.monotonic() + seconds
    ticker = _ticker(lambda: until() or time.monotonic() > limit, task)
    task.timer(LOOK, handler=ticker, interval=LOOK, autoclose=True)
    try:
        task.resume()
    finally:
        task.abort(kill=True)


def _set(task: Any, ssh: Sequence[str], hosts: int) -> None:
    """This task's settings, and not those of a configuration file that belongs to another tool."""
    from ClusterShell.Worker.Ssh import WorkerSsh

    program, *options = ssh
    task.set_default("distant_worker", WorkerSsh)
    task.set_info("ssh_path", shlex.quote(program))
    task.set_info("ssh_options", shlex.join(options))
    task.set_info("ssh_user", None)
    task.set_info("fanout", hosts)
    task.set_info("connect_timeout", 0)
    task.set_info("command_timeout", 0)
    for name in ("stdout_msgtree", "stderr_msgtree", "auto_tree"):
        task.set_default(name, False)


def _handler(listener: Listener) -> Any:
    from ClusterShell.Event import EventHandler

    class Handler(EventHandler):  # type: ignore[misc]
        """ClusterShell's events as the listener's."""

        def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
            """A line came."""
            listener.line(node, msg.decode(errors="replace"), error=sname == worker.SNAME_STDERR)

        def ev_hup(self, worker: Any, node: str, rc: int) -> None:  # noqa: ARG002 - ClusterShell's signature
            """A command ended."""
            listener.ended(node, rc)

    return Handler()


def _ticker(over: Callable[[], bool], task: Any) -> Any:
    from ClusterShell.Event import EventHandler

    class Ticker(EventHandler):  # type: ignore[misc]
        """Looks at the clock."""

        def ev_timer(self, timer: Any) -> None:  # noqa: ARG002 - ClusterShell's signature
            """Another look."""
            if over():
                task.abort(kill=True)

    return Ticker()


def _make_room(hosts: int) -> None:
    """Raise this process's limit of open files as far as is needed. Raises UsageError where that is not allowed."""
    wanted = hosts * EACH + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UsageError(
            f"{hosts} hosts take {wanted} open files, and this user may have {hard}",
            hint="let the scheduler start the ranks: srun python -m dsdoctor.comm --json > comm.json",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
