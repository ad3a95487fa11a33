"""ssh's messages when it could not reach a host -> what that means and how to fix it. A catalogue."""

import re
from dataclasses import dataclass, replace

from dsdoctor.core.finding import Step, step


@dataclass(frozen=True, kw_only=True)
class SshProblem:
    """A way in which ssh fails: ``pattern`` is found in its message (such as ``sample``); the steps have a place for ``{host}``."""

    pattern: str
    what: str
    fix: str
    steps: tuple[Step, ...]
    sample: str = ""


def ssh_problem(host: str, status: int | None, stderr: str) -> SshProblem:
    """The problem that ssh's message shows; ``status`` is None where ssh did not end in time, 255 where ssh itself failed.

    >>> ssh_problem("n1", 255, "ssh: connect to host n1 port 22: Connection refused").what
    'the host is there, and no sshd listens on its port'
    """
    silent = (HANGS,) if status is None else ()
    found = next((problem for problem in (*PROBLEMS, *silent) if re.search(problem.pattern, stderr)), OTHER)
    return replace(found, steps=tuple(typed.filled({"host": host}) for typed in found.steps))


TRY = step("ssh -v -o BatchMode=yes -o ConnectTimeout=5 {host} true")
HANGS = SshProblem(
    pattern="",
    what="it connects and gives no answer in time",
    fix="see what its login scripts wait for (a file system that hangs, a question)",
    steps=(TRY,),
)
OTHER = SshProblem(pattern="", what="the command did not run", fix="see at which step it stops", steps=(TRY,))

PROBLEMS = (
    SshProblem(
        pattern=r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        sample="@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
        what="its host key is another one than known_hosts has",
        fix="if the machine was set up anew, forget its old key",
        steps=(step("ssh-keygen -R {host}"), step("ssh-keyscan {host} >> ~/.ssh/known_hosts")),
    ),
    SshProblem(
        pattern=r"Host key verification failed",
        sample="No ED25519 host key is known for n1 and you have requested strict checking.\nHost key verification failed.",
        what="its host key is not known here, and a launcher cannot answer ssh's question",
        fix="take its key into known_hosts, and compare the fingerprint",
        steps=(step("ssh-keyscan {host} >> ~/.ssh/known_hosts"),),
    ),
    SshProblem(
        pattern=r"UNPROTECTED PRIVATE KEY FILE",
        sample="@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @\nroot@n1: Permission denied (publickey).",
        what="the private key can be read by others, and ssh does not use it",
        fix="take the others' rights away",
        steps=(step("chmod 600 ~/.ssh/id_*"),),
    ),
    SshProblem(
        pattern=r"Too many authentication failures",
        sample="Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures",
        what="the agent offers too many keys before the right one",
        fix="name the one key for this host in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)",
        steps=(TRY,),
    ),
    SshProblem(
        pattern=r"Permission denied",
        sample="root@n1: Permission denied (publickey,password).",
        what="it takes none of this user's keys",
        fix="put the public key there (ssh-keygen makes one); a launcher cannot type a password",
        steps=(step("ssh-copy-id {host}"),),
    ),
    SshProblem(
        pattern=r"Could not resolve hostname",
        sample="ssh: Could not resolve hostname n1: Name or service not known",
        what="its name is not known here",
        fix="correct the name, or give it an address in /etc/hosts or ~/.ssh/config",
        steps=(step("getent hosts {host}"),),
    ),
    SshProblem(
        pattern=r"Connection timed out|Operation timed out|connect to host .*timed out",
        sample="ssh: connect to host n1 port 22: Connection timed out",
        what="nothing answers at its address: the host is down, or a firewall drops the port",
        fix="see whether the host is up, and whether port 22 is open from here",
        steps=(step("ping -c 3 {host}"), TRY),
    ),
    SshProblem(
        pattern=r"Connection refused",
        sample="ssh: connect to host n1 port 22: Connection refused",
        what="the host is there, and no sshd listens on its port",
        fix="start sshd there, or name its port in ~/.ssh/config",
        steps=(step("sudo systemctl start ssh", note="on that host"),),
    ),
    SshProblem(
        pattern=r"No route to host|Network is unreachable",
        sample="ssh: connect to host n1 port 22: No route to host",
        what="there is no way to its address: the host is down, or is in no network of this one",
        fix="see whether the host is up, and which way leads to it",
        steps=(step("ip route get $(getent ahostsv4 {host} | cut -d' ' -f1 | head -n 1)"),),
    ),
    SshProblem(
        pattern=r"Connection (?:closed|reset) by|kex_exchange_identification|Exceeded MaxStartups",
        sample="kex_exchange_identification: Connection closed by remote host",
        what="its sshd ended the connection: too many at once (MaxStartups), or this user may not log in",
        fix="look into sshd's log there",
        steps=(step("sudo journalctl -u ssh -n 20", note="on that host"),),
    ),
    SshProblem(
        pattern=r"not found|No such file or directory|nologin|not available",
        sample="This account is currently not available.",
        what="it lets this user in and gives no shell",
        fix="give this user a shell there",
        steps=(step("getent passwd $USER", note="on that host"),),
    ),
)
"""In this order: the first whose pattern is found counts."""
