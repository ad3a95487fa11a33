"""The question to a host of the hostfile over ssh, and its answer -> a Visit. Runs nothing itself."""

import ipaddress
import re
import shlex
from dataclasses import dataclass

from dsdoctor.core.host import Answer
from dsdoctor.hosts.ssh import for_any_shell

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
class Visit:
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


def parse_visit(host: str, answer: Answer) -> Visit:
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
    return Visit(
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
    launcher would give it; modules are looked for and not imported."""
    find = f"import importlib.util as u; print(*[n for n in {MODULES!r} if u.find_spec(n)])"
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
echo "modules $(PYTHONPATH={search} {python} -c {find} 2>/dev/null)"
listener=$(ss -Hltnp "sport = :{port}" 2>/dev/null | head -n 1)
[ "$listener" ] || listener=$(grep -hi ":{hex} [0-9A-F]*:0000 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null | head -n 1)
echo "listener $listener"
"""
