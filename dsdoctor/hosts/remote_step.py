"""A step for another host, which this machine's shell and that of the other host read one after the other."""

from dsdoctor.core.finding import Step, step


def on_host(host: str, there: Step) -> Step:
    """The step as it is typed here: quoted once for the shell there, and as a whole for the one here.

    >>> on_host("n1", step("ls -l {path}", path="/a b; reboot")).argv[-1]
    "ls -l '/a b; reboot'"
    """
    return step("ssh {host} {remote}", host=host, remote=there.line)
