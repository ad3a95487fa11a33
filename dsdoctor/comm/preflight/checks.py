"""PreflightFacts -> what would stop or mislead DeepSpeed's launcher, and which hosts the test goes on without. Looks at nothing."""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dsdoctor.comm.mesh.checks import hosts_in_words
from dsdoctor.comm.models import named
from dsdoctor.comm.preflight.facts import MAX_SSH_HOSTS, HostProbe, PreflightFacts
from dsdoctor.core.finding import Finding, Severity, Step, alternative, step
from dsdoctor.core.text import and_more_lines
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import ssh_problem
from dsdoctor.ranks.nodelist import fold, in_words
from dsdoctor.rules import book

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
OF_ACCELERATORS = {"cuda": ("NCCL",)}
"""What DeepSpeed 0.19.8 forwards: EXPORT_ENVS of runner.py, and export_envs() of the accelerator."""


def hostfile_line_wrong(facts: PreflightFacts) -> Iterator[Finding]:
    """DeepSpeed stops at a line of the hostfile, or accepts it without a warning and does not take it as it is written."""
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is None:
            yield book.finding(
                "hostfile-line-wrong",
                Severity.ERROR if complaint.refused or complaint.bad_name else Severity.WARNING,
                case="misread" if not complaint.refused else "" if complaint.line else "empty",
                evidence=() if complaint.refused else (complaint.text,),
                file=facts.hostfile,
                line=complaint.line,
                text=repr(complaint.text),
                what=complaint.what,
            )


def host_named_twice(facts: PreflightFacts) -> Iterator[Finding]:
    """One machine is in the hostfile twice, by the same name or by two names."""
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is not None:
            yield book.finding(
                "host-named-twice",
                Severity.ERROR,
                case="same-name",
                evidence=(complaint.text,),
                file=facts.hostfile,
                line=complaint.line,
                what=complaint.what,
            )
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for visit in facts.visits:
        first = seen.setdefault((visit.hostname, visit.addresses), visit.host)
        if visit.addresses and first != visit.host:
            yield book.finding(
                "host-named-twice",
                Severity.ERROR,
                evidence=(" ".join(visit.addresses),),
                first=first,
                second=visit.host,
                file=facts.hostfile,
                hostname=visit.hostname,
            )


def variable_not_forwarded(facts: PreflightFacts) -> Iterator[Finding]:
    """Variables that steer communication are set here, and DeepSpeed's launcher does not forward them to the other hosts."""
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    forwarded = EXPORTED + OF_ACCELERATORS.get(facts.accelerator, ())
    written = {name for file in facts.environment for name in file.names}
    left = [name for name in facts.set_here if not name.startswith(forwarded) and name not in written]
    if left:
        yield book.finding(
            "variable-not-forwarded",
            Severity.WARNING,
            steps=[step("env | grep ^{variable}= >> .deepspeed_env", variable=name) for name in left],
            variables=left,
            forwarded=[f"{name}*" for name in forwarded],
        )


def deepspeed_env_malformed(facts: PreflightFacts) -> Iterator[Finding]:
    """A line of .deepspeed_env stops DeepSpeed's launcher, or arrives on the other hosts as something else."""
    for file in facts.environment:
        for complaint in file.complaints:
            yield book.finding(
                "deepspeed-env-malformed",
                Severity.ERROR if complaint.refused else Severity.WARNING,
                case="" if complaint.refused else "misread",
                evidence=(complaint.text,) if complaint.text else (),
                file=file.path,
                line=complaint.line,
                address=f"{complaint.line}p",
                what=complaint.what,
            )


HOSTFILE_CHECKS = (
    *(hostfile_line_wrong, host_named_twice),
    *(variable_not_forwarded, deepspeed_env_malformed),
)


Cause = TypeVar("Cause", bound=Hashable)
SLOW_LOGIN_SECONDS = 5.0
"""Seconds; a login and a Python that starts take less than one, and a few on a busy network file system."""


def too_many_hosts(facts: PreflightFacts) -> Iterator[Finding]:
    """The hostfile has more hosts than one host can start ranks on over ssh."""
    hosts = facts.hosts.hosts if facts.hosts else ()
    if len(hosts) > MAX_SSH_HOSTS:
        yield book.finding(
            "too-many-hosts",
            Severity.ERROR,
            file=str(facts.hostfile),
            count=f"{len(hosts):,}",
            limit=f"{MAX_SSH_HOSTS:,}",
            nodes=len(hosts),
            slots=max(host.slots for host in hosts),
            ranks=sum(host.slots for host in hosts),
            names=fold(host.name for host in hosts),
            python=facts.python,
        )


def ssh_missing(facts: PreflightFacts) -> Iterator[Finding]:
    """There is no ssh on PATH."""
    if facts.hosts and facts.ssh is None:
        yield book.finding("ssh-missing", Severity.ERROR, count=len(facts.hosts.hosts))


def ssh_fails(facts: PreflightFacts) -> Iterator[Finding]:
    """A host of the hostfile cannot be reached over ssh without a password or a question."""
    silent = [visit for visit in facts.visits if not visit.answered]
    by_what = _grouped(silent, lambda visit: ssh_problem("", visit.status, visit.stderr).what)
    for what, visits in by_what.items():
        first = visits[0]
        problem = ssh_problem(first.host, first.status, first.stderr)
        yield book.finding(
            "ssh-fails",
            Severity.ERROR,
            evidence=first.stderr.splitlines()[-4:],
            steps=problem.steps,
            hosts=_names(visits),
            what=what,
            fix=problem.fix,
        )


def login_scripts_print(facts: PreflightFacts) -> Iterator[Finding]:
    """A host's login scripts print something before any command."""
    master = _first_name(facts)
    noisy = [visit for visit in facts.visits if visit.noise]
    for (word, first), visits in _grouped(noisy, lambda visit: (_word(visit), visit.host == master)).items():
        yield book.finding(
            "login-scripts-print",
            Severity.ERROR if first else Severity.WARNING,
            case="master" if first else "",
            evidence=(visits[0].noise,),
            hosts=_names(visits),
            word=repr(word),
        )


def login_slow(facts: PreflightFacts) -> Iterator[Finding]:
    """A host takes long to answer a command over ssh."""
    slow = [visit for visit in _answered(facts) if visit.seconds > SLOW_LOGIN_SECONDS]
    if slow:
        longest = max(slow, key=lambda visit: visit.seconds)
        yield book.finding(
            "login-slow",
            Severity.WARNING,
            hosts=_names(slow),
            seconds=f"{longest.seconds:.0f}",
            host=longest.host,
        )


def host_lacks_python(facts: PreflightFacts) -> Iterator[Finding]:
    """A host has no Python at the path of this one."""
    without = [visit for visit in _answered(facts) if not visit.python]
    if without:
        yield book.finding(
            "host-lacks-python",
            Severity.ERROR,
            hosts=_names(without),
            host=without[0].host,
            python=facts.python,
        )


def host_lacks_modules(facts: PreflightFacts) -> Iterator[Finding]:
    """A host's Python, at the same path as here, finds no torch, no DeepSpeed or no dsdoctor."""
    lacking = [visit for visit in _answered(facts) if visit.python and _absent(visit)]
    for absent, visits in _grouped(lacking, _absent).items():
        yield book.finding(
            "host-lacks-modules",
            Severity.WARNING if absent == ("deepspeed",) else Severity.ERROR,
            hosts=_names(visits),
            host=visits[0].host,
            python=facts.python,
            modules=absent,
        )


def why_bad(facts: PreflightFacts, visit: HostProbe) -> Finding | None:
    """What keeps a host from taking part, which is its own matter and would be gone without it; the title does not name it."""
    absent = _absent(visit)
    if not visit.answered:
        problem = ssh_problem(visit.host, visit.status, visit.stderr)
        return book.finding(
            "ssh-fails", Severity.ERROR, case="reason", steps=problem.steps, what=problem.what, fix=problem.fix
        )
    if not visit.python:
        return book.finding("host-lacks-python", Severity.ERROR, case="reason", steps=(), python=facts.python)
    if absent and absent != ("deepspeed",):
        return book.finding(
            "host-lacks-modules", Severity.ERROR, case="reason", steps=(), python=facts.python, modules=absent
        )
    return None


def host_lacks_folder(facts: PreflightFacts) -> Iterator[Finding]:
    """A host does not have the working directory of this one."""
    without = [visit for visit in _answered(facts) if not visit.folder]
    if without:
        yield book.finding(
            "host-lacks-folder",
            Severity.WARNING,
            hosts=_names(without),
            host=without[0].host,
            folder=facts.folder,
        )


def pdsh_missing(facts: PreflightFacts) -> Iterator[Finding]:
    """pdsh is not on PATH here, or it cannot use ssh."""
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    if facts.pdsh is None:
        yield book.finding("pdsh-missing", Severity.WARNING, count=len(facts.hosts.hosts), file=facts.hostfile)
    elif facts.pdsh_ways and "ssh" not in facts.pdsh_ways:
        yield book.finding("pdsh-missing", Severity.WARNING, case="no-ssh", pdsh=facts.pdsh, modules=facts.pdsh_ways)


def master_port_in_use(facts: PreflightFacts) -> Iterator[Finding]:
    """A process listens on the master's port already, before a rank is started. See ``rendezvous.checks`` too."""
    first = _first_name(facts)
    listener = next((visit.listener for visit in facts.visits if visit.host == first), None)
    if listener is None:
        return
    evidence = (" ".join(listener.said.split())[:200],)
    port, other_port = facts.port, facts.port + 1
    if listener.pid:
        yield book.finding(
            "master-port-in-use",
            Severity.ERROR,
            case="before-start",
            evidence=evidence,
            host=listener.host,
            port=port,
            pid=listener.pid,
            command=listener.command,
            other_port=other_port,
        )
        return
    yield book.finding(
        "master-port-in-use",
        Severity.ERROR,
        case="before-start-unseen",
        evidence=evidence,
        host=listener.host,
        port=port,
        other_port=other_port,
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
        on = next((f" ({network.name})" for network in first.networks if network.address == master), "")
        yield book.finding(
            "master-address-elsewhere",
            Severity.ERROR,
            case="same" if same else "",
            evidence=tuple(f"{visit.host}: {' '.join(visit.addresses)}" for visit in (first, *others[:3])),
            taken=f"{master}{on}",
            host=first.host,
            other=next(iter(same), None),
            address=next(iter(better), None),
        )


def _grouped(visits: Iterable[HostProbe], cause: Callable[[HostProbe], Cause]) -> dict[Cause, list[HostProbe]]:
    """The hosts of each cause: a thousand hosts with one cause are one finding."""
    groups: dict[Cause, list[HostProbe]] = defaultdict(list)
    for visit in visits:
        groups[cause(visit)].append(visit)
    return groups


def _names(visits: Iterable[HostProbe]) -> str:
    return in_words(visit.host for visit in visits)


def _word(visit: HostProbe) -> str:
    """What DeepSpeed would take for an address."""
    return visit.noise.split()[0]


def _absent(visit: HostProbe) -> tuple[str, ...]:
    return tuple(name for name in ("torch", "deepspeed", "dsdoctor") if name not in visit.modules)


def _first(facts: PreflightFacts) -> HostProbe | None:
    return next((visit for visit in _answered(facts) if visit.host == _first_name(facts)), None)


def _first_name(facts: PreflightFacts) -> str | None:
    """The host whose address DeepSpeed makes the master's."""
    return facts.hosts.hosts[0].name if facts.hosts and facts.hosts.hosts else None


def _answered(facts: PreflightFacts) -> Iterator[HostProbe]:
    return (visit for visit in facts.visits if visit.answered)


def _near(first: HostProbe, address: str, other: HostProbe) -> bool:
    """Whether another host has an address in the network of this address."""
    prefix = next((network.prefix for network in first.networks if network.address == address), None)
    if prefix is None or address in other.addresses:
        return False
    network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    return any(ipaddress.ip_address(theirs) in network for theirs in other.addresses)


CHECKS = (
    *HOSTFILE_CHECKS,
    *(too_many_hosts, ssh_missing, ssh_fails, login_slow, login_scripts_print),
    *(host_lacks_python, host_lacks_modules, host_lacks_folder, pdsh_missing),
    *(master_port_in_use, master_address_elsewhere),
)


MAX_CAUSES = 12
MAX_EXCLUDED_HOSTS = 32
"""Hosts that DeepSpeed's --exclude, which knows no brackets, can still be given on a line."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Hosts that were left out of a test, each with its reason, and the hosts that are left; the files that list them."""

    hostfile: str
    bad: Mapping[str, str]
    good: tuple[Slots, ...]
    good_file: str
    bad_file: str
    tested: bool


def bad_hosts(facts: PreflightFacts) -> dict[str, str]:
    """The hosts that cannot take part, by what they answered over ssh, and why."""
    whys = ((visit.host, why_bad(facts, visit)) for visit in facts.visits)
    return {host: why.title for host, why in whys if why is not None}


def without(facts: PreflightFacts, bad: Mapping[str, str]) -> PreflightFacts:
    """The facts as if these hosts were not in the hostfile."""
    assert facts.hosts is not None
    left = tuple(entry for entry in facts.hosts.hosts if entry.name not in bad)
    visits = tuple(visit for visit in facts.visits if visit.host not in bad)
    return replace(facts, hosts=replace(facts.hosts, hosts=left), visits=visits)


def files_of(left: LeftOut) -> tuple[tuple[str, str], ...]:
    """The path and the text of each list: a hostfile of the good ones, and the names of the bad ones."""
    good = "".join(f"{host.name} slots={host.slots}\n" for host in left.good)
    return (left.good_file, good), (left.bad_file, "".join(f"{name}\n" for name in left.bad))


def hosts_left_out(left: LeftOut) -> Iterator[Finding]:
    """Hosts of the hostfile cannot take part, and the others were tested without them (--skip-bad), or can be."""
    if left.bad and left.good:
        yield book.finding(
            "hosts-left-out",
            Severity.WARNING,
            case="" if left.tested else "not-tested",
            evidence=_reasons(left),
            steps=_steps(left),
            count=len(left.bad),
            total=len(left.bad) + len(left.good),
            hosts=in_words(left.bad),
        )


def _reasons(left: LeftOut) -> tuple[str, ...]:
    by_why: dict[str, list[str]] = defaultdict(list)
    for host, why in left.bad.items():
        by_why[why].append(host)
    lines = [f"{in_words(hosts)}: {why}" for why, hosts in by_why.items()] if left.tested else []
    return (
        *and_more_lines(lines, MAX_CAUSES, of="causes"),
        f"good: {left.good_file}",
        f"bad: {left.bad_file}",
    )


def _steps(left: LeftOut) -> Iterator[Step]:
    if not left.tested:
        yield step("python -m dsdoctor comm --hostfile {file} --skip-bad", file=left.hostfile)
    yield step("deepspeed --hostfile {file} ...", file=left.good_file)
    if len(left.bad) <= MAX_EXCLUDED_HOSTS:
        names = "@".join(left.bad)
        yield alternative("deepspeed --hostfile {file} --exclude {hosts} ...", file=left.hostfile, hosts=names)
    yield alternative("sbatch --exclude {hosts} ...", hosts=fold(left.bad))


WORDS = re.compile(
    r"(?P<where>\S+:\d+)(?: \([^)]*\))?, where rank 0 should be, "
    r"(?P<how>does not answer|refuses|cannot be routed to|is a name that does not resolve)(?!:)"
)
"""How a rank says that it did not reach rank 0 (master_unreachable in rendezvous/checks.py). One that was led to its own
host ("refuses: ...") says nothing of rank 0's."""
NOT_FOUND = "is a name that does not resolve"
MAX_SHOWN = 4


def master_unreachable(words: Mapping[int, str], hosts: Sequence[str], came: set[int]) -> Iterator[Finding]:
    """Ranks were started on their hosts, and rank 0 ran, and did not answer them: see ``rendezvous.checks`` too.
    ``words``: by rank, its last line; ``hosts``: of every rank; ``came``: the ranks that did."""
    said = {rank: match for rank, text in sorted(words.items()) if rank not in came and (match := WORDS.search(text))}
    others = {host for host in hosts if host != hosts[0]}
    for how in sorted({match["how"] for match in said.values()}):
        ranks = tuple(rank for rank, match in said.items() if match["how"] == how)
        where, away = said[ranks[0]]["where"], {hosts[rank] for rank in ranks}
        master, _, port = where.rpartition(":")
        evidence = tuple(words[rank].removeprefix("rendezvous: ") for rank in ranks[:MAX_SHOWN])
        if how == NOT_FOUND:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="no-name-there",
                evidence=evidence,
                ranks=named(ranks, hosts),
                master=master,
                host=hosts[ranks[0]],
            )
        elif away == others:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="lets-nobody-in",
                evidence=evidence,
                rank_0=hosts[0],
                ranks=named(ranks, hosts),
                where=where,
                how=how,
                host=hosts[ranks[0]],
                master=master,
                port=port,
            )
        else:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="some-hosts",
                evidence=evidence,
                rank_0=hosts[0],
                ranks=named(ranks, hosts),
                hosts=hosts_in_words(away),
                where=where,
                how=how,
                host=hosts[ranks[0]],
                master=master,
                port=port,
            )
