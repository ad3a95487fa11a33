"""The limits of a rank's own process -> findings, and whether a limit is what broke a test. Looks at nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsdoctor.comm.local.rank_view import WHO, Check, RankView
from dsdoctor.comm.models import Local
from dsdoctor.core.finding import Finding, Severity, instead, step

GIB, MIB = 1 << 30, 1 << 20
LITTLE_MEMLOCK = 1 * GIB
LITTLE_SPACE = 4 * GIB
"""torch on the CPU maps about 1 GiB before it allocates anything; with CUDA far more."""
TINY_SPACE = {"gloo": 1 * GIB, "nccl": 64 * GIB}
"""Below, torch or its threads cannot be loaded."""
FILES_BESIDE = 32
"""Open files that a rank has without a connection to any other: below it cannot even say what it lacks."""


def memlock_limited(place: RankView) -> Iterator[Finding]:
    """This process may lock little memory, and InfiniBand and RoCE need locked memory for every buffer.

    What counts is the limit of the launched process, not that of your shell: the daemons of Slurm, sshd and Docker have
    their own. (Root with CAP_IPC_LOCK is not bound by it.)

    Why it matters: NCCL stops with "ibv_reg_mr ... Cannot allocate memory".

    How to fix it: raise the limit where the ranks are started. In Slurm set LimitMEMLOCK=infinity in slurmd.service.

        $ ulimit -l unlimited
        $ docker run --ulimit memlock=-1 --cap-add IPC_LOCK ...

    Since: 0.1
    """
    limit = place.local.memlock
    if place.local.fabric and limit is not None and limit < LITTLE_MEMLOCK:
        yield (Finding.warning if place.backend == "nccl" else Finding.note)(
            "memlock-limited",
            f"{WHO}: only {limit / MIB:g} MiB may be locked, and InfiniBand locks every buffer",
            evidence=("RLIMIT_MEMLOCK of this very process",),
            fix="raise the limit where the ranks are started (Slurm: LimitMEMLOCK=infinity in slurmd.service)",
            steps=(
                step("ulimit -l unlimited"),
                instead("docker run --ulimit memlock=-1 --cap-add IPC_LOCK ..."),
            ),
        )


def nofile_low(place: RankView) -> Iterator[Finding]:
    """This process may open few files, and each connection between ranks is one.

    Why it matters: gloo connects every rank with every other for each group, and NCCL opens several sockets for each
    peer. Four for each rank are counted here; without them connections fail. The limit is called the cause where it leaves
    almost nothing beside a file for each rank, and the test was broken.

    How to fix it: raise the limit where the ranks are started.

        $ ulimit -n 65536
        $ docker run --ulimit nofile=65536 ...

    Since: 0.1
    """
    limit, needed = place.local.nofile, 4 * place.world + 256
    if limit is not None and limit < needed:
        yield Finding.warning(
            "nofile-low",
            f"{WHO}: only {limit} files may be open (ulimit -n), {place.world} ranks need about {needed}",
            evidence=("RLIMIT_NOFILE of this very process",),
            fix="raise the limit where the ranks are started",
            steps=(step("ulimit -n 65536"), instead("docker run --ulimit nofile=65536 ...")),
        )


def address_space_limited(place: RankView) -> Iterator[Finding]:
    """This process may map little memory (`ulimit -v`, RLIMIT_AS), whatever memory the host has.

    Why it matters: torch's libraries alone map about 1 GiB, and CUDA reserves address space for all memory of the host and
    of its GPUs. Too little shows as "failed to map segment from shared object", "can't start new thread", "OpenBLAS error:
    Memory allocation still failed" or "can't allocate memory", and none of these names the limit.

    How to fix it: take the limit away where the ranks are started. Batch systems set it from the memory that was asked for.

        $ ulimit -v unlimited

    Since: 0.1
    """
    limit = place.local.address_space
    if limit is not None and limit < (LITTLE_SPACE if place.backend != "nccl" else TINY_SPACE["nccl"]):
        yield Finding.warning(
            "address-space-limited",
            f"{WHO}: only {limit / MIB:.0f} MiB of address space may be used (ulimit -v), and torch alone needs about 1 GiB",
            evidence=("RLIMIT_AS of this very process",),
            fix="take the limit away where the ranks are started",
            steps=(step("ulimit -v unlimited"),),
        )


def is_tiny(local: Local, world: int, backend: str) -> bool:
    """Whether this process can hardly run at all: what breaks is then the limit's doing."""
    files = local.nofile is not None and local.nofile < world + FILES_BESIDE
    space = local.address_space is not None and local.address_space < TINY_SPACE.get(backend, TINY_SPACE["gloo"])
    return files or space


def blamed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same findings with those about files and address space as the errors that they are."""
    rules = {"nofile-low", "address-space-limited"}
    return tuple(
        replace(finding, severity=Severity.ERROR) if finding.rule in rules else finding for finding in findings
    )


CHECKS: tuple[Check, ...] = (memlock_limited, nofile_low, address_space_limited)
