"""Machine -> a finding about shared memory that runs which were killed left in /dev/shm."""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Machine
from dsdoctor.core.processes import SEGMENT, Leftover

FOLDER = "/dev/shm/"
NOTICEABLE = 10
"""Leftovers matter from the tenth part of /dev/shm on."""
MIB = 1 << 20
MOST_FILES = 64
"""Segments that one command names."""
MOST_LINES = 6
HOURS = 3600


def shared_memory_left_over(machine: Machine) -> Iterator[Finding]:
    """Runs that were killed left segments in /dev/shm, and these take a tenth of it or more.

    DeepSpeed's collectives on the CPU take 66 MiB a rank (deepspeed_allreduce_buffer_USER_ADDRESS_PORT_RANK), which no killed rank
    gives back; NCCL's segments are called nccl-..., torch's tensors in shared memory torch_.... Judged are those that are older
    than a minute and that no process has mapped or open.

    Why it matters: What lies in /dev/shm is memory. The next run dies of a bus error or "No space left on device" when it is full;
    and one with the same address and port takes over DeepSpeed's old segments with what is in them.

    How to fix it: Delete those that no process uses, while no run is starting. A user sees the own processes only, and a container
    not those outside of it: the finding then says so, and the command is the one that looks, on the host itself.

        $ sudo fuser -v /dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_29500_0
        $ rm -- /dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_29500_0

    Since: 0.1
    """
    shared = machine.shared_memory
    left = tuple(each for each in shared.leftovers if _is_segment(each.path)) if shared else ()
    taken = sum(each.size for each in left)
    if shared is None or taken == 0 or taken * NOTICEABLE < shared.total:
        return
    sure = tuple(each for each in left if not each.doubt)
    told = sure or left
    files = [each.path for each in told[:MOST_FILES]]
    many = f"{len(left)} segment{'s' * (len(left) > 1)} of runs that ended"
    yield Finding.warning(
        "shared-memory-left-over",
        f"{many} take {taken / MIB:.0f} of the {shared.total / MIB:.0f} MiB of /dev/shm, and no process is seen to use them",
        evidence=(
            *map(_line, told[:MOST_LINES]),
            *([f"and {len(told) - MOST_LINES} more"] if len(told) > MOST_LINES else []),
            *_unseen(left, len(left) - len(sure)),
        ),
        fix="delete them while no run is starting: no process has them mapped or open"
        if sure
        else "look whether a process uses them, and delete those that none does",
        steps=(step("rm -- {files}", files=files),)
        if sure
        else (step("sudo fuser -v {files}", files=files, note="on the host itself, outside of containers"),),
    )


def _is_segment(path: str) -> bool:
    """The paths may be those of another machine's snapshot, and nothing but a segment may be deleted."""
    return path.startswith(FOLDER) and SEGMENT.fullmatch(path.removeprefix(FOLDER)) is not None


def _line(each: Leftover) -> str:
    age = f"{each.age / HOURS:.0f} hours" if each.age >= 2 * HOURS else f"{each.age / 60:.0f} minutes"
    return f"{each.path}: {each.size / MIB:.0f} MiB, {age} old"


def _unseen(left: tuple[Leftover, ...], count: int) -> Iterator[str]:
    if count:
        doubts = "; ".join(dict.fromkeys(each.doubt for each in left if each.doubt))
        yield f"whether a process uses {count} of them cannot be seen: {doubts}"


CHECKS = (shared_memory_left_over,)
