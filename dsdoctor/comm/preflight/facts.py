"""Host -> what is known before a rank is started: the hostfile, every host of it over ssh, the master's port, variables.

Looks, never judges. The facts hold the names of variables, never their values.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dsdoctor.comm.local.variables import is_secret
from dsdoctor.comm.preflight.visit import Visit, parse_visit, question
from dsdoctor.core.host import Answer, Host
from dsdoctor.hosts.hostfile import HOST, Complaint, Hostfile, Slots, chosen, parse_deepspeed_env, parse_hostfile

SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
MOST_AT_ONCE = 256
MOST_BY_SSH = 1000
"""Hosts to which one host holds a connection each: as many were measured (benchmarks/comm_hosts.py)."""
LONGEST = 10.0
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
    visits: tuple[Visit, ...] = ()
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
    limit: float = LONGEST,
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
    few = hosts is not None and len(hosts.hosts) <= MOST_BY_SSH
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
    linker search, and those of .deepspeed_env. Nothing that looks like a secret."""
    found: dict[str, str] = {}
    for prefix in (*STEERING, *FOR_OURS):
        found.update(host.variables(prefix))
    for path in _environment_paths(host, folder):
        found.update(parse_deepspeed_env(host.read(path) or "").values)
    return {name: value for name, value in sorted(found.items()) if not is_secret(name, value)}


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


def _visit_all(host: Host, ssh: str, hosts: Sequence[Slots], asked: str, limit: float) -> tuple[Visit, ...]:
    def visit(entry: Slots) -> Visit:
        began = time.monotonic()
        visit = parse_visit(entry.name, host.run([ssh, *SSH, entry.name, asked], timeout=limit))
        return replace(visit, seconds=time.monotonic() - began)

    if not hosts:
        return ()
    with ThreadPoolExecutor(max_workers=min(MOST_AT_ONCE, len(hosts))) as pool:
        return tuple(pool.map(visit, hosts))
