"""Incidents made by hand: ranks with sequence numbers, operations and stacks, one thing wrong at a time."""

from dsdoctor.core.processes import FileHolder
from dsdoctor.hang.models import Frame, GroupState, Incident, Lock, Operation, RankView, Sample, ThreadStack

TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def frame(file: str, line: int, function: str, text: str = "") -> Frame:
    return Frame(file=file, line=line, function=function, text=text)


def calling(name: str, line: int = 20) -> tuple[Frame, ...]:
    """The stack of a rank that waits in a collective."""
    return (frame("/home/a/train.py", line, "main", f"dist.{name}(x)"), frame(TORCH, 9, name, "work.wait()"))


def elsewhere(text: str = "time.sleep(9)", line: int = 33) -> tuple[Frame, ...]:
    """The stack of a rank that stands in the user's own code."""
    return (frame("/home/a/train.py", 11, "<module>", "main()"), frame("/home/a/train.py", line, "main", text))


def operation(sequence: int, name: str, *sizes: int, state: str = "scheduled") -> Operation:
    return Operation(sequence=sequence, name=name, sizes=(sizes,) if sizes else (), state=state)


def view(
    rank: int,
    frames: tuple[Frame, ...],
    sequence: int | dict[str, int],
    *,
    world: int = 4,
    operations: tuple[Operation, ...] = (),
    joined: bool = True,
    leaving: bool = False,
    failure: str = "",
    **outside: object,
) -> RankView:
    """A rank as its supervisor sees it; ``outside`` are the fields of the view."""
    numbers = {"0": sequence} if isinstance(sequence, int) else sequence
    groups = tuple(
        GroupState(name=name, ranks=tuple(range(world)), sequence=number, operations=operations)
        for name, number in numbers.items()
    )
    sample = Sample(
        rank=rank,
        world=world,
        pid=100 + rank,
        time=0.0,
        joined=joined,
        leaving=leaving,
        failure=failure,
        groups=groups if joined else (),
        threads=(ThreadStack(name="MainThread", frames=frames, main=True),),
    )
    return RankView(rank=rank, host="node1", pid=100 + rank, sample=sample, **outside)  # type: ignore[arg-type]


def incident(*views: RankView, world: int = 4, **fields: object) -> Incident:
    """One that has lasted so long that no rank is only late."""
    return Incident(**{"world": world, "still": 361.0, "after": 60.0, "ranks": views, **fields})  # type: ignore[arg-type]


def lock(path: str = "/c/torch_extensions/x/lock", holder: int | None = None, doubt: str = "") -> Lock:
    return Lock(path=path, holder=FileHolder(pid=holder, doubt=doubt), age=600.0)
