"""The hosts of a hostfile, --include and --exclude -> the hosts that are meant, in the hostfile's order. Starts nothing."""

from collections.abc import Sequence

from dsdoctor.core.errors import UsageError
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.ranks.nodelist import expand, fold


def chosen(hosts: Sequence[Slots], *, include: str | None = None, exclude: str | None = None) -> tuple[Slots, ...]:
    """Those that are left. Both texts are lists of names as Slurm writes them, or with DeepSpeed's "@" in between.

    Raises UsageError for a name that is not among ``hosts``, for slots, for both at once and where nothing is left.

    >>> hosts = [Slots(name=f"n{number}", slots=8, line=number) for number in (3, 1, 2)]
    >>> [host.name for host in chosen(hosts, exclude="n[1-2]")], [host.name for host in chosen(hosts, include="n2@n3")]
    (['n3'], ['n3', 'n2'])
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude cannot be given together", hint="name the one or the other")
    text, option = (include, "--include") if include is not None else (exclude, "--exclude")
    if text is None:
        return tuple(hosts)
    named = _names(text, option)
    absent = sorted(named - {host.name for host in hosts})
    if absent:
        raise UsageError(
            f"{option} names {fold(absent)}, and the hostfile has {fold(host.name for host in hosts) or 'no host'}",
            hint="name hosts as the hostfile does",
        )
    left = tuple(host for host in hosts if (host.name in named) == (include is not None))
    if not left:
        raise UsageError(f"{option} {text} leaves none of the {len(hosts)} hosts", hint="leave at least one")
    return left


def _names(text: str, option: str) -> set[str]:
    if ":" in text:
        raise UsageError(
            f"{option} {text!r} names slots, and whole hosts are tested", hint="change slots= of that line instead"
        )
    try:
        return set(expand(text.strip().replace("@", ",")))
    except UsageError as error:
        raise UsageError(f"{option}: {error}", hint="name hosts as in: n1,gpu[01-08] or n1@n2") from None
