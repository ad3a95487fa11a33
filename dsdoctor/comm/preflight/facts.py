"""Host -> what is known before a rank is started: the hostfile, every host of it over ssh, the master's port, variables.

Looks, never judges. The facts hold the names of variables, never their values.
"""

import ipaddress
import re
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dsdoctor.core.host import Answer, Host
from dsdoctor.core.redaction import setting
from dsdoctor.hosts.hostfile import HOST, Complaint, Hostfile, Slots, chosen, parse_deepspeed_env, parse_hostfile
from dsdoctor.hosts.ssh import BATCH_OPTIONS, for_any_shell

# The question to a host of the hostfile over ssh, and its answer -> a HostProbe. Runs nothing itself.


MARK = "@@dsdoctor"
MODULES = ("torch", "deepspeed", "dsdoctor")


@dataclass(frozen=True, kw_only=True)
class PortListener:
    """Who has a port of a host: the line that shows it, and the process where it could be seen."""

    host: str
    said: str
    pid: int | None = None
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class Network:
    """An address of a host, with the length of its network's prefix, and the interface it is on."""

    name: str
    address: str
    prefix: int


@dataclass(frozen=True, kw_only=True)
class HostProbe:
    """What a host of the hostfile answered over ssh. ``status`` is ssh's (255: it could not get there; None: not in time).

    ``noise`` is what its login scripts print before any command; ``addresses`` are the words of ``hostname -I``; ``modules``
    are those of torch, deepspeed and dsdoctor that the same interpreter path finds there, in the same folder; ``seconds``: how long
    the answer took.
    """

    host: str
    status: int | None
    stderr: str = ""
    answered: bool = False
    noise: str = ""
    hostname: str = ""
    addresses: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    python: bool = False
    folder: bool = False
    modules: tuple[str, ...] = ()
    listener: PortListener | None = None
    seconds: float = 0.0


def parse_visit(host: str, answer: Answer) -> HostProbe:
    """What a host answered to ``question``.

    >>> text = "welcome\\n@@dsdoctor\\nhost nodeb\\naddresses 10.0.0.2 \\nnetwork eth0 10.0.0.2/24\\npython\\nmodules torch\\n"
    >>> visit = parse_visit("b", Answer(returncode=0, stdout=text))
    >>> visit.noise, visit.hostname, visit.addresses, visit.networks[0].prefix, visit.python, visit.folder, visit.modules
    ('welcome', 'nodeb', ('10.0.0.2',), 24, True, False, ('torch',))
    """
    noise, mark, said = answer.stdout.partition(MARK + "\n")
    lines = [line.partition(" ") for line in said.splitlines()]
    words = {key: rest.strip() for key, _, rest in reversed(lines)}
    networks = (re.fullmatch(r"(\S+) (\S+)/(\d{1,3})", rest) for key, _, rest in lines if key == "network")
    addresses = filter(_is_address, words.get("addresses", "").split())
    return HostProbe(
        host=host,
        status=answer.returncode,
        stderr=answer.stderr.strip()[-2000:],
        answered=bool(mark),
        noise=noise.strip()[:200] if mark else "",
        hostname=words.get("host", ""),
        addresses=tuple(addresses),
        networks=tuple(
            Network(name=n[1], address=n[2], prefix=int(n[3])) for n in networks if n and _is_address(n[2], int(n[3]))
        ),
        python="python" in words,
        folder="folder" in words,
        modules=tuple(words.get("modules", "").split()),
        listener=_listener(host, words["listener"]) if words.get("listener") else None,
    )


def _is_address(text: str, prefix: int = 0) -> bool:
    try:
        return prefix <= ipaddress.ip_address(text).max_prefixlen
    except ValueError:
        return False


def _listener(host: str, said: str) -> PortListener:
    """A line of ``ss -p``, or of /proc/net/tcp where there is no ss."""
    match = re.search(r'\(\("([^"]*)",pid=(\d+)', said)
    return PortListener(host=host, said=said, pid=int(match[2]) if match else None, command=match[1] if match else None)


def question(python: str, folder: str, port: int, search_path: str | None) -> str:
    """One command for any login shell. The interpreter is asked in the folder and with the search path that DeepSpeed's
    launcher would give it, which are only looked at: nothing that lies there is imported, as a sitecustomize would be."""
    find = (
        "import importlib.util as u, site, sys; site.addsitedir(site.getusersitepackages()); "
        "sys.path[:] = [*sys.argv[1].split(':'), *sys.path]; "
        f"print(*[n for n in {MODULES!r} if u.find_spec(n)])"
    )
    search = ":".join(part for part in (folder, search_path) if part)
    return for_any_shell(
        QUESTION.format(
            mark=MARK,
            folder=shlex.quote(folder),
            python=shlex.quote(python),
            find=shlex.quote(find),
            search=shlex.quote(search),
            port=port,
            hex=f"{port:04X}",
        ),
        "dsdoctor",
    )


QUESTION = """\
echo {mark}
echo "host $(uname -n)"
echo "addresses $(hostname -I 2>/dev/null)"
ip -o addr show scope global 2>/dev/null | while read -r _ name _ address _; do echo "network $name $address"; done
cd {folder} 2>/dev/null && echo folder
[ -x {python} ] && echo python
echo "modules $({python} -I -c {find} {search} 2>/dev/null)"
listener=$(ss -Hltnp "sport = :{port}" 2>/dev/null | head -n 1)
[ "$listener" ] || listener=$(grep -hi ":{hex} [0-9A-F]*:0000 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null | head -n 1)
echo "listener $listener"
"""


MAX_SSH_AT_ONCE = 256
MAX_SSH_HOSTS = 1000
"""Hosts to which one host holds a connection each: as many were measured (benchmarks/comm_hosts.py)."""
PREFLIGHT_TIMEOUT_SECONDS = 10.0
"""Seconds for one host, where there is no deadline that leaves more: five to connect, the rest for a login shell and a Python on a
slow file system."""

STEERING = (
    *("NCCL_", "RCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "HCCL_", "CCL_"),
    *("DEEPSPEED_TIMEOUT", "DS_ACCELERATOR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
)
"""What a rank's communication depends on, by the beginnings of the names."""

FOR_OURS = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""What DeepSpeed's launcher forwards or sets itself."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """A .deepspeed_env: the names it sets, and what is wrong with its lines."""

    path: str
    names: tuple[str, ...]
    complaints: tuple[Complaint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PreflightFacts:
    """What is known before a rank is started. ``hostfile`` is the path that was asked for, ``hosts`` None where no such file is.

    ``set_here`` are the names of variables that steer communication and are set; ``accelerator`` is DeepSpeed's ("cuda",
    "cpu", ...); ``pdsh_ways`` are the ways pdsh can reach a host (None: not asked).
    """

    python: str
    folder: str
    port: int
    hostfile: str | None = None
    hosts: Hostfile | None = None
    environment: tuple[Variables, ...] = ()
    ssh: str | None = None
    pdsh: str | None = None
    pdsh_ways: tuple[str, ...] | None = None
    visits: tuple[HostProbe, ...] = ()
    set_here: tuple[str, ...] = ()
    accelerator: str = "cuda"


def look_preflight(
    host: Host,
    *,
    hostfile: str | None,
    python: str,
    folder: str,
    port: int = 29500,
    accelerator: str = "cuda",
    limit: float = PREFLIGHT_TIMEOUT_SECONDS,
    include: str | None = None,
    exclude: str | None = None,
) -> PreflightFacts:
    """Look at everything, all hosts at the same time, ``limit`` seconds for each. ``folder`` is the working directory.

    ``include`` and ``exclude`` name hosts of the hostfile; the others are neither asked nor told of.
    """
    path = None if hostfile is None else hostfile if hostfile.startswith("/") else f"{folder}/{hostfile}"
    text = None if path is None else host.read(path)
    hosts = None if text is None else parse_hostfile(text)
    if hosts is not None:
        hosts = replace(hosts, hosts=chosen(hosts.hosts, include=include, exclude=exclude))
    few = hosts is not None and len(hosts.hosts) <= MAX_SSH_HOSTS
    reachable = [entry for entry in hosts.hosts if HOST.fullmatch(entry.name)] if hosts and few else []
    asked = question(python, folder, port, host.variable("PYTHONPATH"))
    ssh, pdsh = host.which("ssh"), host.which("pdsh") if hosts else None
    return PreflightFacts(
        python=python,
        folder=folder,
        port=port,
        hostfile=path,
        hosts=hosts,
        environment=look_environment(host, folder) if hosts else (),
        ssh=ssh,
        pdsh=pdsh,
        pdsh_ways=parse_pdsh(host.run([pdsh, "-V"], timeout=5)) if pdsh else None,
        visits=_visit_all(host, ssh, reachable, asked, limit) if ssh else (),
        set_here=tuple(sorted({name for prefix in STEERING for name in host.names(prefix)})),
        accelerator=accelerator,
    )


def look_forwarded(host: Host, folder: str) -> dict[str, str]:
    """The variables that our own ranks on other hosts get, values included: those that steer communication, what Python and the
    linker search, and those of .deepspeed_env. They stand in ssh's command line, so none that is not known to be harmless."""
    found: dict[str, str] = {}
    for prefix in (*STEERING, *FOR_OURS):
        found.update(host.variables(prefix))
    for path in _environment_paths(host, folder):
        found.update(parse_deepspeed_env(host.read(path) or "").values)
    return {name: value for name, value in sorted(found.items()) if setting(name, value) == value}


def look_environment(host: Host, folder: str) -> tuple[Variables, ...]:
    """The .deepspeed_env files in the order that DeepSpeed reads them: the home folder's, then the working directory's."""
    found = []
    for path in _environment_paths(host, folder):
        text = host.read(path)
        if text is not None:
            read = parse_deepspeed_env(text)
            found.append(Variables(path=path, names=tuple(read.values), complaints=read.complaints))
    return tuple(found)


def _environment_paths(host: Host, folder: str) -> tuple[str, ...]:
    name = host.variable("DS_ENV_FILE") or ".deepspeed_env"
    folders = (host.variable("HOME") or "/root", folder)
    return tuple(dict.fromkeys(name if name.startswith("/") else f"{parent}/{name}" for parent in folders))


def parse_pdsh(answer: Answer) -> tuple[str, ...] | None:
    """The ways pdsh can reach a host.

    >>> parse_pdsh(Answer(returncode=0, stdout="pdsh-2.34 (+readline)\\nrcmd modules: ssh,rsh,exec (default: rsh)"))
    ('ssh', 'rsh', 'exec')
    """
    match = re.search(r"^rcmd modules: (\S+)", answer.stdout, re.MULTILINE)
    return tuple(match[1].split(",")) if match else None


def _visit_all(host: Host, ssh: str, hosts: Sequence[Slots], asked: str, limit: float) -> tuple[HostProbe, ...]:
    def visit(entry: Slots) -> HostProbe:
        began = time.monotonic()
        visit = parse_visit(entry.name, host.run([ssh, *BATCH_OPTIONS, entry.name, asked], timeout=limit))
        return replace(visit, seconds=time.monotonic() - began)

    if not hosts:
        return ()
    with ThreadPoolExecutor(max_workers=min(MAX_SSH_AT_ONCE, len(hosts))) as pool:
        return tuple(pool.map(visit, hosts))
