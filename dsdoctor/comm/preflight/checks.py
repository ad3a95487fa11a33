"""StaticFacts -> findings: what would stop or mislead DeepSpeed's launcher, before a rank is started. Looks at nothing."""

import ipaddress
import shlex
from collections.abc import Iterator

from dsdoctor.comm.preflight import hostfile_checks
from dsdoctor.comm.preflight.facts import StaticFacts
from dsdoctor.comm.preflight.visit import Visit
from dsdoctor.comm.say import error, warning
from dsdoctor.core.finding import Finding
from dsdoctor.hosts.ssh_errors import ssh_problem


def ssh_missing(facts: StaticFacts) -> Iterator[Finding]:
    """There is no ssh on PATH: DeepSpeed's launcher and pdsh reach the other hosts with it."""
    if facts.hosts and facts.ssh is None:
        title = f"ssh is not on PATH, and {len(facts.hosts.hosts)} hosts are to be reached with it"
        yield error("ssh-missing", title, (), "install it", "sudo apt-get install openssh-client")


def ssh_fails(facts: StaticFacts) -> Iterator[Finding]:
    """A host of the hostfile cannot be reached over ssh without a password or a question.

    DeepSpeed tries the first host alone, throws ssh's words away, and sets no time limit; for every other host the ranks that
    did start wait until their own timeout. Here every host is tried with BatchMode and ConnectTimeout, and ssh's words are shown.
    """
    for visit in facts.visits:
        if not visit.answered:
            problem = ssh_problem(visit.host, visit.status, visit.stderr)
            evidence = tuple(visit.stderr.splitlines()[-4:])
            yield error(
                "ssh-fails",
                f"{visit.host} does not answer over ssh: {problem.what}",
                evidence,
                problem.fix,
                *problem.commands,
            )


def login_scripts_print(facts: StaticFacts) -> Iterator[Finding]:
    """A host's login scripts print something before any command.

    DeepSpeed takes the first word of `ssh HOST hostname -I` as the address of rank 0: a greeting in ~/.bashrc becomes the master
    address. scp and rsync stumble over it too.
    """
    for visit in facts.visits:
        if visit.noise:
            first = visit.host == _first_name(facts)
            title = f"{visit.host} prints {visit.noise.split()[0]!r} before the answer of any command over ssh"
            title += ", and DeepSpeed takes that word as the master address" if first else ""
            fix = "let its ~/.bashrc print in interactive shells only, or name the master"
            commands = (
                "case $- in *i*) ;; *) return ;; esac  # first line of ~/.bashrc",
                "deepspeed --master_addr ADDRESS ...",
            )
            yield (error if first else warning)("login-scripts-print", title, (visit.noise,), fix, *commands)


def host_lacks_python(facts: StaticFacts) -> Iterator[Finding]:
    """A host has no Python at the path of this one: launchers start the same path everywhere.

    The environment has to lie on a file system that all hosts share, or be made on each host at the same path.
    """
    for visit in _answered(facts):
        if not visit.python:
            title = f"{visit.host} has no {facts.python}, and the launcher starts that path on every host"
            fix = "make the same environment at the same path there, or put it on a shared file system"
            command = f"ssh {shlex.quote(visit.host)} ls -l {shlex.quote(facts.python)}"
            yield error("host-lacks-python", title, (), fix, command)


def host_lacks_modules(facts: StaticFacts) -> Iterator[Finding]:
    """A host's Python, at the same path, finds no torch, no DeepSpeed or no dsdoctor.

    The ranks of that host end at their first import, and all others wait for them. Modules are looked for in the working
    directory and with PYTHONPATH, as DeepSpeed's launcher would start them; they are not imported.
    """
    for visit in _answered(facts):
        absent = [name for name in ("torch", "deepspeed", "dsdoctor") if name not in visit.modules]
        if visit.python and absent:
            title = f"{visit.host}: {facts.python} finds no {' and no '.join(absent)}"
            command = f"ssh {shlex.quote(visit.host)} {shlex.quote(facts.python)} -m pip install {' '.join(absent)}"
            only = absent == ["deepspeed"]
            yield (warning if only else error)(
                "host-lacks-modules", title, (), "install it there as it is here", command
            )


def host_lacks_folder(facts: StaticFacts) -> Iterator[Finding]:
    """A host has no such working directory: DeepSpeed's launcher changes into it on every host, fails, and goes on elsewhere.

    A script named by a relative path is then not found there.
    """
    for visit in _answered(facts):
        if not visit.folder:
            title = f"{visit.host} has no folder {facts.folder}, and DeepSpeed's launcher changes into it"
            fix = "start from a folder that every host has, or make it there"
            command = f"ssh {shlex.quote(visit.host)} mkdir -p {shlex.quote(facts.folder)}"
            yield warning("host-lacks-folder", title, (), fix, command)


def pdsh_missing(facts: StaticFacts) -> Iterator[Finding]:
    """pdsh is not here, or cannot use ssh: DeepSpeed's launcher takes it for more than one host, and stops without it.

    Other launchers do not need it, neither does `dsdoctor comm`. It has to be on the host that starts, not on the others.
    """
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    install = ("sudo apt-get install pdsh  # Fedora, RHEL: pdsh pdsh-rcmd-ssh", "deepspeed --launcher openmpi ...")
    if facts.pdsh is None:
        title = (
            f"pdsh is not on PATH, and DeepSpeed starts the {len(facts.hosts.hosts)} hosts of {facts.hostfile} with it"
        )
        yield warning("pdsh-missing", title, (), "install it, or take another launcher", *install)
    elif facts.pdsh_ways and "ssh" not in facts.pdsh_ways:
        title = f"{facts.pdsh} knows {', '.join(facts.pdsh_ways)}, and DeepSpeed wants ssh (PDSH_RCMD_TYPE)"
        yield warning("pdsh-missing", title, (), "install its ssh module, or take another launcher", *install)


def master_port_in_use(facts: StaticFacts) -> Iterator[Finding]:
    """Somebody listens on the master's port already.

    Rank 0 stops with EADDRINUSE, and every other rank talks to the stranger and waits, with torch without any time limit. 29500
    is the default of every launcher: two jobs on one node collide, and a job that was killed may have left a process behind.
    """
    first = _first_name(facts)
    listener = facts.listener or next((visit.listener for visit in facts.visits if visit.host == first), None)
    if listener:
        process = f"process {listener.pid} ({listener.command or 'unknown'})" if listener.pid else "another process"
        where = f" on {listener.host}, the first host," if listener.host else ""
        title = f"port {facts.port}{where} is taken by {process}, and rank 0 is to listen on it"
        evidence = (" ".join(listener.said.split())[:200],)
        ssh = f"ssh {shlex.quote(listener.host)} " if listener.host else ""
        look = (f"{ssh}ps -fp {listener.pid}",) if listener.pid else (f"{ssh}sudo ss -ltnp sport = :{facts.port}",)
        fix = "take another port, or end that process if it is a leftover"
        yield error("master-port-in-use", title, evidence, fix, f"deepspeed --master_port {facts.port + 1} ...", *look)


def master_address_elsewhere(facts: StaticFacts) -> Iterator[Finding]:
    """DeepSpeed takes the first word of `hostname -I` on the first host as the master address, and that is the wrong one.

    On a host with several addresses the first may be docker's bridge or a management network. The other hosts either have the
    same address themselves, or none in that network, while another address of the first host is in a network of all.
    """
    first = _first(facts)
    others = [visit for visit in _answered(facts) if first and visit.host != first.host and visit.addresses]
    if first is None or not first.addresses or not others:
        return
    master = first.addresses[0]
    same = [visit.host for visit in others if master in visit.addresses]
    better = [address for address in first.addresses if all(_near(first, address, visit) for visit in others)]
    if same or (better and master not in better):
        fact = f"{same[0]} has that address too" if same else f"{better[0]} is in a network of all hosts"
        on = next((f" ({network.name})" for network in first.networks if network.address == master), "")
        title = f"DeepSpeed would take {master}{on} of {first.host} as the master address, and {fact}"
        evidence = tuple(f"{visit.host}: {' '.join(visit.addresses)}" for visit in (first, *others[:3]))
        command = f"deepspeed --master_addr {better[0] if better else 'ADDRESS'} ..."
        yield error("master-address-elsewhere", title, evidence, "name the address that all hosts can reach", command)


def _first(facts: StaticFacts) -> Visit | None:
    return next((visit for visit in _answered(facts) if visit.host == _first_name(facts)), None)


def _first_name(facts: StaticFacts) -> str | None:
    """The host whose address DeepSpeed makes the master's."""
    return facts.hosts.hosts[0].name if facts.hosts and facts.hosts.hosts else None


def _answered(facts: StaticFacts) -> Iterator[Visit]:
    return (visit for visit in facts.visits if visit.answered)


def _near(first: Visit, address: str, other: Visit) -> bool:
    """Whether another host has an address of its own in the network of this address."""
    prefix = next((network.prefix for network in first.networks if network.address == address), None)
    if prefix is None or address in other.addresses:
        return False
    network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    return any(ipaddress.ip_address(theirs) in network for theirs in other.addresses)


CHECKS = (
    *hostfile_checks.CHECKS,
    *(ssh_missing, ssh_fails, login_scripts_print),
    *(host_lacks_python, host_lacks_modules, host_lacks_folder, pdsh_missing),
    *(master_port_in_use, master_address_elsewhere),
)
