"""PreflightFacts -> findings: what would stop or mislead DeepSpeed's launcher, before a rank is started. Looks at nothing."""

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from dsdoctor.comm.preflight.facts import MOST_BY_SSH, PreflightFacts, Visit
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.hosts.ssh import on_host, ssh_problem
from dsdoctor.ranks.nodelist import fold, in_words

# PreflightFacts -> findings about the hostfile, .deepspeed_env and the variables that are not forwarded. Looks at nothing.


EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
OF_ACCELERATORS = {"cuda": ("NCCL",)}
"""What DeepSpeed 0.19.8 forwards: EXPORT_ENVS of runner.py, and export_envs() of the accelerator."""

NO_HOST = "is no host name"
"""The complaint that ssh can do nothing with: nobody is asked at such a name."""


def hostfile_line_wrong(facts: PreflightFacts) -> Iterator[Finding]:
    """DeepSpeed stops at a line of the hostfile, or accepts it without a warning and does not take it as it is written."""
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is not None:
            continue
        what, line = complaint.what, f", line {complaint.line}:" if complaint.line else ""
        if complaint.refused:
            what = f"{complaint.text!r} is {what}" if line else f"has {what}"
        end = ": DeepSpeed stops at it" if complaint.refused else "; DeepSpeed takes the line without a warning"
        yield (Finding.error if complaint.refused or NO_HOST in complaint.what else Finding.warning)(
            "hostfile-line-wrong",
            f"{facts.hostfile}{line} {what}{end}",
            evidence=() if complaint.refused else (complaint.text,),
            fix="write one line for each host as it is meant, as in: node1 slots=8",
        )


def host_named_twice(facts: PreflightFacts) -> Iterator[Finding]:
    """One machine is in the hostfile twice, by the same name or by two names."""
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is not None:
            title = f"{facts.hostfile}, line {complaint.line}: {complaint.what}, and DeepSpeed stops at it"
            yield Finding.error(
                "host-named-twice", title, evidence=(complaint.text,), fix="keep one line for each host"
            )
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for visit in facts.visits:
        first = seen.setdefault((visit.hostname, visit.addresses), visit.host)
        if visit.addresses and first != visit.host:
            title = f"{first} and {visit.host} in {facts.hostfile} are one machine ({visit.hostname})"
            yield Finding.error(
                "host-named-twice", title, evidence=(" ".join(visit.addresses),), fix="keep one line for each host"
            )


def variable_not_forwarded(facts: PreflightFacts) -> Iterator[Finding]:
    """Variables that steer communication are set here, and DeepSpeed's launcher does not forward them to the other hosts."""
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    forwarded = EXPORTED + OF_ACCELERATORS.get(facts.accelerator, ())
    written = {name for file in facts.environment for name in file.names}
    left = [name for name in facts.set_here if not name.startswith(forwarded) and name not in written]
    if left:
        verb = "is" if len(left) == 1 else "are"
        title = f"{', '.join(left)} {verb} set here, and DeepSpeed's launcher forwards only {'*, '.join(forwarded)}*"
        steps = (step("env | grep ^{variable}= >> .deepspeed_env", variable=name) for name in left)
        fix = "write what the other hosts need into .deepspeed_env of the folder that you start from"
        yield Finding.warning("variable-not-forwarded", title, fix=fix, steps=steps)


def deepspeed_env_malformed(facts: PreflightFacts) -> Iterator[Finding]:
    """A line of .deepspeed_env stops DeepSpeed's launcher, or arrives on the other hosts as something else."""
    for file in facts.environment:
        for complaint in file.complaints:
            end = "DeepSpeed stops at it" if complaint.refused else "it is not forwarded as it is written"
            title = f"{file.path}, line {complaint.line}: {complaint.what}, and {end}"
            evidence = (complaint.text,) if complaint.text else ()
            fix = "write plain lines, as in: GLOO_SOCKET_IFNAME=eth0"
            show = step("sed -n {line} {file}", line=f"{complaint.line}p", file=file.path)
            yield (Finding.error if complaint.refused else Finding.warning)(
                "deepspeed-env-malformed", title, evidence=evidence, fix=fix, steps=(show,)
            )


HOSTFILE_CHECKS = (
    *(hostfile_line_wrong, host_named_twice),
    *(variable_not_forwarded, deepspeed_env_malformed),
)


Cause = TypeVar("Cause", bound=Hashable)
SLOW_LOGIN = 5.0
"""Seconds; a login and a Python that starts take less than one, and a few on a busy network file system."""


def too_many_hosts(facts: PreflightFacts) -> Iterator[Finding]:
    """The hostfile has more hosts than one host can start ranks on over ssh."""
    hosts = facts.hosts.hosts if facts.hosts else ()
    if len(hosts) <= MOST_BY_SSH:
        return
    most, ranks = max(host.slots for host in hosts), sum(host.slots for host in hosts)
    yield Finding.error(
        "too-many-hosts",
        f"{facts.hostfile} has {len(hosts):,} hosts, and over ssh one host starts ranks on {MOST_BY_SSH:,} at most",
        fix="let the scheduler start the ranks, and have what rank 0 wrote read here (more options before --json)",
        steps=(
            step(
                "srun --nodes={nodes} --ntasks-per-node={ranks} --nodelist={names} --kill-on-bad-exit=0"
                " {python} -m dsdoctor.comm --json > comm.json",
                nodes=len(hosts),
                ranks=most,
                names=fold(host.name for host in hosts),
                python=facts.python,
            ),
            instead(
                "mpirun -np {ranks} --hostfile {file} {python} -m dsdoctor.comm --json > comm.json",
                ranks=ranks,
                file=str(facts.hostfile),
                python=facts.python,
            ),
            step("python -m dsdoctor comm --read comm.json"),
        ),
    )


def ssh_missing(facts: PreflightFacts) -> Iterator[Finding]:
    """There is no ssh on PATH."""
    if facts.hosts and facts.ssh is None:
        title = f"ssh is not on PATH, and {len(facts.hosts.hosts)} hosts are to be reached with it"
        yield Finding.error(
            "ssh-missing", title, fix="install it", steps=(step("sudo apt-get install openssh-client"),)
        )


def ssh_fails(facts: PreflightFacts) -> Iterator[Finding]:
    """A host of the hostfile cannot be reached over ssh without a password or a question."""
    silent = [visit for visit in facts.visits if not visit.answered]
    by_what = _grouped(silent, lambda visit: ssh_problem("", visit.status, visit.stderr).what)
    for what, visits in by_what.items():
        first = visits[0]
        problem = ssh_problem(first.host, first.status, first.stderr)
        verb = "does" if len(visits) == 1 else "do"
        yield Finding.error(
            "ssh-fails",
            f"{_names(visits)} {verb} not answer over ssh: {what}",
            evidence=first.stderr.splitlines()[-4:],
            fix=problem.fix,
            steps=problem.steps,
        )


def login_scripts_print(facts: PreflightFacts) -> Iterator[Finding]:
    """A host's login scripts print something before any command."""
    master = _first_name(facts)
    noisy = [visit for visit in facts.visits if visit.noise]
    for (word, first), visits in _grouped(noisy, lambda visit: (_word(visit), visit.host == master)).items():
        title = f"{_names(visits)} {_verb(visits, 'print')} {word!r} before the answer of any command over ssh"
        title += ", and DeepSpeed takes that word as the master address" if first else ""
        fix = "let its ~/.bashrc print in interactive shells only, or name the master"
        steps = (
            step("case $- in *i*) ;; *) return ;; esac", note="first line of ~/.bashrc"),
            instead("deepspeed --master_addr {address} ..."),
        )
        yield (Finding.error if first else Finding.warning)(
            "login-scripts-print", title, evidence=(visits[0].noise,), fix=fix, steps=steps
        )


def login_slow(facts: PreflightFacts) -> Iterator[Finding]:
    """A host takes long to answer a command over ssh."""
    slow = [visit for visit in _answered(facts) if visit.seconds > SLOW_LOGIN]
    if slow:
        longest = max(slow, key=lambda visit: visit.seconds)
        try_it = step("ssh -o BatchMode=yes {host} true", host=longest.host)
        title = f"{_names(slow)} {_verb(slow, 'take')} up to {longest.seconds:.0f} s to answer over ssh"
        fix = "see what its login scripts wait for: every start of a job waits with them"
        yield Finding.warning("login-slow", title, fix=fix, steps=(try_it,))


def host_lacks_python(facts: PreflightFacts) -> Iterator[Finding]:
    """A host has no Python at the path of this one."""
    without = [visit for visit in _answered(facts) if not visit.python]
    if without:
        have = "has" if len(without) == 1 else "have"
        title = f"{_names(without)} {have} no {facts.python}, and the launcher starts that path on every host"
        fix = "make the same environment at the same path there, or put it on a shared file system"
        look = step("ls -l {python}", python=facts.python)
        yield Finding.error("host-lacks-python", title, fix=fix, steps=(on_host(without[0].host, look),))


def host_lacks_modules(facts: PreflightFacts) -> Iterator[Finding]:
    """A host's Python, at the same path as here, finds no torch, no DeepSpeed or no dsdoctor."""
    lacking = [visit for visit in _answered(facts) if visit.python and _absent(visit)]
    for absent, visits in _grouped(lacking, _absent).items():
        title = f"{_names(visits)}: {facts.python} finds no {' and no '.join(absent)}"
        install = step("{python} -m pip install {modules}", python=facts.python, modules=absent)
        yield (Finding.warning if absent == ("deepspeed",) else Finding.error)(
            "host-lacks-modules", title, fix="install it there as it is here", steps=(on_host(visits[0].host, install),)
        )


def host_lacks_folder(facts: PreflightFacts) -> Iterator[Finding]:
    """A host does not have the working directory of this one."""
    without = [visit for visit in _answered(facts) if not visit.folder]
    if without:
        have = "has" if len(without) == 1 else "have"
        title = f"{_names(without)} {have} no folder {facts.folder}, and DeepSpeed's launcher changes into it"
        fix = "start from a folder that every host has, or make it there"
        make = step("mkdir -p {folder}", folder=facts.folder)
        yield Finding.warning("host-lacks-folder", title, fix=fix, steps=(on_host(without[0].host, make),))


def pdsh_missing(facts: PreflightFacts) -> Iterator[Finding]:
    """pdsh is not on PATH here, or it cannot use ssh."""
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    install = (
        step("sudo apt-get install pdsh"),
        instead("sudo dnf install pdsh pdsh-rcmd-ssh"),
        instead("deepspeed --launcher openmpi ..."),
    )
    if facts.pdsh is None:
        title = (
            f"pdsh is not on PATH, and DeepSpeed starts the {len(facts.hosts.hosts)} hosts of {facts.hostfile} with it"
        )
        yield Finding.warning("pdsh-missing", title, fix="install it, or take another launcher", steps=install)
    elif facts.pdsh_ways and "ssh" not in facts.pdsh_ways:
        title = f"{facts.pdsh} knows {', '.join(facts.pdsh_ways)}, and DeepSpeed wants ssh (PDSH_RCMD_TYPE)"
        yield Finding.warning(
            "pdsh-missing", title, fix="install its ssh module, or take another launcher", steps=install
        )


def master_port_in_use(facts: PreflightFacts) -> Iterator[Finding]:
    """A process listens on the master's port already. The manual page of this rule is in rendezvous/absent_checks.py."""
    first = _first_name(facts)
    listener = next((visit.listener for visit in facts.visits if visit.host == first), None)
    if listener is None:
        return
    process = f"process {listener.pid} ({listener.command or 'unknown'})" if listener.pid else "another process"
    listening = step("sudo ss -ltnp sport = :{port}", port=facts.port)
    look = step("ps -fp {pid}", pid=listener.pid) if listener.pid else listening
    yield Finding.error(
        "master-port-in-use",
        f"port {facts.port} on {listener.host}, the first host, is taken by {process}, and rank 0 needs it",
        evidence=(" ".join(listener.said.split())[:200],),
        fix="take another port, or end that process if it is left over",
        steps=(on_host(listener.host, look), instead("deepspeed --master_port {port} ...", port=facts.port + 1)),
    )


def master_address_elsewhere(facts: PreflightFacts) -> Iterator[Finding]:
    """DeepSpeed would take an address as the master's that the other hosts cannot use."""
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
        name = step("deepspeed --master_addr {address} ...").filled({"address": better[0]} if better else {})
        yield Finding.error(
            "master-address-elsewhere",
            title,
            evidence=evidence,
            fix="name the address that all hosts can reach",
            steps=(name,),
        )


def _grouped(visits: Iterable[Visit], cause: Callable[[Visit], Cause]) -> dict[Cause, list[Visit]]:
    """The hosts of each cause: a thousand hosts with one cause are one finding."""
    groups: dict[Cause, list[Visit]] = defaultdict(list)
    for visit in visits:
        groups[cause(visit)].append(visit)
    return groups


def _names(visits: Iterable[Visit]) -> str:
    return in_words(visit.host for visit in visits)


def _verb(visits: Sequence[Visit], verb: str) -> str:
    return f"{verb}s" if len(visits) == 1 else verb


def _word(visit: Visit) -> str:
    """What DeepSpeed would take for an address."""
    return visit.noise.split()[0]


def _absent(visit: Visit) -> tuple[str, ...]:
    return tuple(name for name in ("torch", "deepspeed", "dsdoctor") if name not in visit.modules)


def _first(facts: PreflightFacts) -> Visit | None:
    return next((visit for visit in _answered(facts) if visit.host == _first_name(facts)), None)


def _first_name(facts: PreflightFacts) -> str | None:
    """The host whose address DeepSpeed makes the master's."""
    return facts.hosts.hosts[0].name if facts.hosts and facts.hosts.hosts else None


def _answered(facts: PreflightFacts) -> Iterator[Visit]:
    return (visit for visit in facts.visits if visit.answered)


def _near(first: Visit, address: str, other: Visit) -> bool:
    """Whether another host has an address in the network of this address."""
    prefix = next((network.prefix for network in first.networks if network.address == address), None)
    if prefix is None or address in other.addresses:
        return False
    network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    return any(ipaddress.ip_address(theirs) in network for theirs in other.addresses)


OF_ONE_HOST = (ssh_fails, host_lacks_python, host_lacks_modules)
"""Checks whose error is the matter of the host that it names, and would be gone without it."""

CHECKS = (
    *HOSTFILE_CHECKS,
    *(too_many_hosts, ssh_missing, ssh_fails, login_slow, login_scripts_print),
    *(host_lacks_python, host_lacks_modules, host_lacks_folder, pdsh_missing),
    *(master_port_in_use, master_address_elsewhere),
)
