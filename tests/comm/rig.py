"""Real "nodes" on one machine: each is a set of namespaces (network, hostname, mounts, processes) joined by bridges.

A node has its own addresses, hosts file, /dev/shm, /run and processes, and shares the rest of the filesystem. The first
process of each node is killed by the kernel when this process ends, however it ends, and everything of the node with it:
nothing is left behind and two rigs never meet, for the bridges too live in a namespace of their own.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NEEDED = ("ip", "ethtool", "nsenter", "unshare", "setpriv")
SCRIPTS = Path(sys.executable).parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FIRST = r"""
set -e
cd "$1"
mount --make-rprivate /
hostname "$2"
mkdir cgroup
mount --rbind /sys/fs/cgroup cgroup
mount -t sysfs sysfs /sys
mount --rbind cgroup /sys/fs/cgroup
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/sshd /run/lock /run/tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
echo "$2" >hostname
for file in hosts hostname resolv.conf; do mount --bind $file /etc/$file || true; done
: >bashrc
[ ! -e /root/.bashrc ] || mount --bind bashrc /root/.bashrc
trap '' CHLD
echo >ready
exec sleep infinity
"""
"""A node's first process. sysfs is mounted anew because it shows the interfaces of the namespace it was mounted in;
without SIGCHLD the kernel reaps the orphans. A login over ssh reads no start file of this machine: what it starts, such as a rehash
of pyenv, takes locks that a node's end would leave behind."""


def missing() -> str | None:
    """Why no rig can be had here, None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a rig needs root on Linux"
    if absent := [program for program in NEEDED if not shutil.which(program)]:
        return f"a rig needs {', '.join(absent)}"
    namespaces = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "true"]
    tried = subprocess.run(namespaces, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def shell(*command: str) -> str:
    """Runs a command of the machine itself and returns its output; a failure shows what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def wait_until(answers: Any, seconds: float, what: str, log: Path | None = None) -> None:
    """Polls ``answers()`` until it is true; after ``seconds`` raises with the end of the log."""
    until = time.monotonic() + seconds
    while not answers():
        if time.monotonic() > until:
            said = log.read_text(errors="replace")[-3000:] if log and log.exists() else ""
            raise TimeoutError(f"{what} after {seconds:g} s\n{said}")
        time.sleep(0.05)


class Space:
    """Namespaces held by a process that dies with this one. ``pid`` is its process as the machine counts."""

    def __init__(self, name: str, command: Sequence[str], flags: Sequence[str]) -> None:
        self.name = name
        held = ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--fork", "--kill-child", *command]
        self.holder = subprocess.Popen(held, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        wait_until(lambda: self.holder.poll() is not None or children.read_text().strip(), 5, f"{name} did not start")
        if self.holder.poll() is not None:
            raise RuntimeError(f"{name}: {self.holder.stderr.read().decode()}")  # type: ignore[union-attr]
        self.pid = int(children.read_text().split()[0])

    def net(self, *command: str) -> str:
        """A command with this network and the machine's own files and processes, such as ``ip`` or ``iptables``."""
        return shell("nsenter", f"--net=/proc/{self.pid}/ns/net", *command)

    def end(self) -> None:
        """Kills the first process, and with it everything in the namespaces; waits until they are gone."""
        self.holder.kill()
        self.holder.communicate()


class Node(Space):
    """One "machine" of a rig: ``addresses[n]`` is that of the interface ``eth<n>`` on link n."""

    def __init__(self, name: str, folder: Path, addresses: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.folder, self.addresses, self.env = folder, addresses, env
        self.started: list[subprocess.Popen[str]] = []
        folder.mkdir()
        (folder / "resolv.conf").write_text("")
        (folder / "hosts").write_text("")
        everything = ("--net", "--uts", "--mount", "--ipc", "--pid", "--mount-proc")
        super().__init__(name, ["sh", "-c", FIRST, name, str(folder), name], everything)
        self.net("ip", "link", "set", "lo", "up")

    @property
    def address(self) -> str:
        """The address on the first link."""
        return self.addresses[0]

    def hosts(self, text: str) -> None:
        """Writes the node's /etc/hosts."""
        (self.folder / "hosts").write_text(text)

    def inside(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The command line that runs ``argv`` in the node."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self.folder), *argv]

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
    ) -> "subprocess.Popen[str]":
        """Starts a command in the node, in a session of its own; end it with ``stop`` (it dies with the node anyway)."""
        channels = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        around = {**self.env, **(env or {})}
        own = {"text": True, "errors": "replace", "start_new_session": True}
        self.started.append(subprocess.Popen(self.inside(argv, cwd), env=around, **{**own, **channels, **more}))
        return self.started[-1]

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, check: bool = False, **more: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command in the node to its end; after ``timeout`` its whole group is killed and TimeoutExpired raised."""
        process = self.popen(argv, **more)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            stop(process)
            late.output, late.stderr = process.communicate()
            raise
        if check and process.returncode != 0:
            raise RuntimeError(f"{self.name}: {shlex.join(argv)} ended with {process.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def end(self) -> None:
        """Ends the node and what was started in it."""
        super().end()
        for process in self.started:
            stop(process)
            with process:
                pass


def stop(process: "subprocess.Popen[str]", number: int = signal.SIGKILL) -> None:
    """Signals a process of a node and everything in its group."""
    if process.poll() is None:
        os.killpg(process.pid, number)


class Rig:
    """``with Rig(folder, nodes=2, links=1) as rig``: nodes "nodea", "nodeb"... at 10.200.<link>.1, .2 and so on.

    ``rig.bin`` stands first on every node's PATH (services put their wrappers there). Offloads are off: packets are packets.
    """

    def __init__(self, folder: Path, nodes: int = 2, links: int = 1) -> None:
        self.folder = folder.resolve()
        self.bin = self.folder / "bin"
        self.home = self.folder / "home"
        self.links = links
        self.names = tuple(f"node{chr(ord('a') + number)}" for number in range(nodes))
        self.nodes: list[Node] = []
        self.switch: Space | None = None

    def __enter__(self) -> "Rig":
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def environment(self) -> dict[str, str]:
        """What every command of a node starts with: nothing of ours but what it needs to be found."""
        path = f"{self.bin}:{SCRIPTS}:{SYSTEM_PATH}"
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "TMPDIR": "/run/tmp"}

    def hosts(self) -> str:
        """The hosts file of a cluster that is well: every name at its address on the first link."""
        return "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in self.nodes)

    def _build(self) -> None:
        for folder in (self.folder, self.bin, self.home):
            folder.mkdir(parents=True, exist_ok=True)
        self.switch = Space("switch", ["sleep", "infinity"], ["--net"])
        for link in range(self.links):
            self.switch.net("ip", "link", "add", f"br{link}", "type", "bridge")
            self.switch.net("ip", "link", "set", f"br{link}", "up")
        for number, name in enumerate(self.names):
            addresses = tuple(f"10.200.{link}.{number + 1}" for link in range(self.links))
            self.nodes.append(Node(name, self.folder / name, addresses, self.environment()))
            for link in range(self.links):
                self._cable(self.nodes[-1], number, link)
        for node in self.nodes:
            wait_until((node.folder / "ready").exists, 10, f"{node.name} is not ready")
            node.hosts(self.hosts())

    def _cable(self, node: Node, number: int, link: int) -> None:
        assert self.switch
        port, inner = port_of(number, link), f"eth{link}"
        self.switch.net("ip", "link", "add", port, "type", "veth", "peer", "name", inner, "netns", str(node.pid))
        self.switch.net("ip", "link", "set", port, "master", f"br{link}", "up")
        node.net("ip", "address", "add", f"{node.addresses[link]}/24", "dev", inner)
        node.net("ip", "link", "set", inner, "up")
        for space, interface in ((self.switch, port), (node, inner)):
            space.net("ethtool", "-K", interface, "tso", "off", "gso", "off", "gro", "off")

    def _end(self) -> None:
        for space in (*reversed(self.nodes), self.switch):
            if space:
                space.end()


def port_of(number: int, link: int = 0) -> str:
    """The switch's interface to a node."""
    return f"port{number}-{link}"
