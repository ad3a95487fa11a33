"""Commands on other hosts over ssh: how they are written, run, and what it means when a host cannot be reached.

Only this module imports ClusterShell.
"""

import base64
import re
import resource
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Fix, Severity, Step, step
from dsdoctor.rules import book
from dsdoctor.rules.store import Table

BATCH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
"""A question to a host: no prompt, and no long wait for one that is down."""
SESSION_OPTIONS = ("-T", *BATCH_OPTIONS, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""A command that runs for as long as we do: ssh itself notices a host that has gone."""
POLL_SECONDS = 0.05
HOST_DESCRIPTORS, OTHER_DESCRIPTORS = 3, 64
"""What a host takes (stdin, stdout, stderr), and what this process needs for everything else."""


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


@dataclass(frozen=True, kw_only=True)
class RemoteFix:
    """A fix as it arrives: a sentence and lines."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RemoteFinding:
    """A finding that another host sent. Fields that other releases of dsdoctor have are passed over.

    Its commands are shown, and never offered to be pasted: anybody may have written them, and JSON of others cannot make a Step.
    """

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fix: RemoteFix | None = None

    def ours(self) -> Finding:
        """The finding without a step.

        >>> fix = RemoteFix(text="install it", commands=("pip install x",))
        >>> RemoteFinding(rule="r", severity=Severity.NOTE, title="t", fix=fix).ours().evidence
        ('it advises: pip install x',)
        """
        return Finding(
            rule=self.rule,
            severity=self.severity,
            title=self.title,
            evidence=tuple(self._evidence()),
            affects=self.affects,
            ranks=self.ranks,
            fix=Fix(text=self.fix.text) if self.fix else None,
        )

    def _evidence(self) -> Iterator[str]:
        for text in self.evidence:
            line = text.strip()
            # "$" at the beginning of a line is the mark of our own commands
            yield f"it says: {line}" if line.startswith("$") else text
        for command in self.fix.commands if self.fix else ():
            yield f"it advises: {command}"


@dataclass(frozen=True, kw_only=True)
class SshProblem:
    """A way in which ssh fails, as a sentence ends with it; its fix and steps, all in the book's words."""

    what: str
    fix: str
    steps: tuple[Step, ...]


def for_any_shell(script: str, name: str) -> str:
    """The script in base64: csh takes no newline and no "!" between quotes, fish reads backslashes there. ``name`` is its $0, which
    ``ps`` shows.

    >>> for_any_shell("echo hi", "greet")
    'exec sh -c \\'eval "$(echo ZWNobyBoaQ== | base64 -d)"\\' greet'
    """
    text = base64.b64encode(script.encode()).decode()
    return f"exec sh -c 'eval \"$(echo {text} | base64 -d)\"' {shlex.quote(name)}"


def on_host(host: str, there: Step) -> Step:
    """The step as it is typed here: quoted once for the shell there, and as a whole for the one here.

    >>> on_host("n1", step("ls -l {path}", path="/a b; reboot")).argv[-1]
    "ls -l '/a b; reboot'"
    """
    return step("ssh {host} {remote}", host=host, remote=there.line)


def ssh_problem(host: str, status: int | None, stderr: str) -> SshProblem:
    """The problem that ssh's message shows; ``status`` is None where ssh did not end in time, 255 where ssh itself failed.

    >>> ssh_problem("n1", 255, "ssh: connect to host n1 port 22: Connection refused").what
    'the host is up, but no sshd listens on its port'
    """
    table = next(one for one in book.tables("hosts", "ssh") if _fits(one, status, stderr))
    return SshProblem(what=table["what"], fix=table["fix"], steps=book.steps_of(table, {"host": host}))


def on_hosts(
    commands: Sequence[HostCommand],
    listener: Listener,
    *,
    ssh: Sequence[str],
    seconds: float,
    until: Callable[[], bool],
) -> None:
    """One command on each host, all at the same time, until all have ended, ``until`` is true or the time is up; whatever happens,
    no ssh is left. Their stdin stays open until then: what runs there can end with it.

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
    task.timer(POLL_SECONDS, handler=ticker, interval=POLL_SECONDS, autoclose=True)
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
    wanted = hosts * HOST_DESCRIPTORS + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UsageError(
            f"{hosts} hosts take {wanted} open files, but this user may have {hard}",
            hint="let the scheduler start the ranks: srun python -m dsdoctor.comm --json > comm.json",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _fits(table: Table, status: int | None, stderr: str) -> bool:
    if "pattern" in table:
        return re.search(table["pattern"], stderr) is not None
    return status is None or not table.get("timeout")
