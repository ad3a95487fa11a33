"""The sequence numbers of all ranks -> who waits for whom, and in which group. Judges, never looks."""

import array
import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsdoctor.hang.models import GroupState, Operation, RankView
from dsdoctor.hang.stacks import (
    acting_stack,
    collective_in,
    frame_text,
    in_backward,
    in_earlier_call,
    waits_on_work_handle,
)
from dsdoctor.ranks.nodelist import ranks_in_words

Compared = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]
PARTED_SHARE = 0.34
"""Of the calls after one that differs: so many differ where the ranks have parted."""
MIN_CALLS_AFTER = 12
MAX_HISTORY = 4000
EARLIER_CALL = "work.wait()"
"""Where a rank waits for a call that it began before: of a send or a receive no number tells."""
ROOTED = {"broadcast", "reduce", "scatter", "gather", "broadcast_object_list", "scatter_object_list", "gather_object"}
"""Collectives in which all ranks must name the same one."""
BACKWARD = "backward"
"""Where a rank that stands still in autograd's engine waits: DistributedDataParallel calls its collectives there, in C++."""


@dataclass(frozen=True, kw_only=True)
class LaggingRanks:
    """Ranks that have not called a collective which other members of their group have called and wait in."""

    group: str
    ranks: tuple[int, ...]
    sequence: int
    waiting: tuple[int, ...]
    ahead: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective of a group that its members did not call alike. ``calls``: each kind of call with its ranks.
    ``parted``: after it they called other operations, too."""

    group: str
    sequence: int
    calls: tuple[tuple[Operation, tuple[int, ...]], ...]
    parted: bool = False

    @property
    def same_name(self) -> bool:
        """Whether all called the same operation, of other sizes or types."""
        return len({operation.name for operation, _ in self.calls}) == 1

    @property
    def same_sizes(self) -> bool:
        """Whether only the types of the elements differ."""
        return self.same_name and len({operation.sizes for operation, _ in self.calls}) == 1


class Waiting:
    """What the sequence numbers of some ranks say. Ranks that are dead count with what they had called."""

    def __init__(self, views: tuple[RankView, ...]) -> None:
        self.views = {view.rank: view for view in views}
        self._groups: dict[str, dict[int, GroupState]] = {}
        for view in views:
            for group in view.sample.groups if view.sample else ():
                self._groups.setdefault(group.name, {})[view.rank] = group

    def lagging(self) -> tuple[LaggingRanks, ...]:
        """Where some members of a group are behind others, those first that nobody else holds up."""
        found = list(self._all_lagging())
        late = {rank: [each for each in found if rank in each.waiting] for each in found for rank in each.ranks}
        # whoever is late in one group and waits in another is held up there
        roots = [each for each in found if any(not late[rank] for rank in each.ranks)]
        chosen = roots or found
        return tuple(
            LaggingRanks(
                group=each.group,
                ranks=tuple(rank for rank in each.ranks if not late[rank]) or each.ranks,
                sequence=each.sequence,
                waiting=each.waiting,
                ahead=each.ahead,
            )
            for each in chosen
        )

    def differences(self) -> Iterator[Difference]:
        """For each group the first recorded call that was not the same on all of its members that recorded it."""
        for name, members in sorted(self._groups.items()):
            calls: dict[int, dict[int, Operation]] = {}
            for rank, group in members.items():
                for operation in recorded_calls(group):
                    calls.setdefault(operation.sequence, {})[rank] = operation
            recent = {each.sequence for group in members.values() for each in group.operations}
            found = [each for sequence in sorted(calls) if (each := _difference(name, sequence, calls[sequence]))]
            old = {each.sequence for each in found} - recent
            # calls of long ago that differ in size alone, and have ended, may be meant so: not where many after them differ too
            last = max(calls, default=0)
            for number, each in enumerate(found):
                after = (len(found) - number) / max(last - each.sequence + 1, MIN_CALLS_AFTER)
                if each.sequence not in old or not each.same_name or after >= PARTED_SHARE:
                    yield replace(each, parted=any(not later.same_name for later in found[number:]))
                    break

    def before(self, difference: Difference) -> tuple[str, ...]:
        """The first of the calls before a difference that the ranks made from different lines, or "" where none is known."""
        members = self._groups[difference.group]
        calls: dict[int, dict[int, Operation]] = {}
        for rank, group in members.items():
            for operation in recorded_calls(group):
                if operation.place and operation.sequence < difference.sequence:
                    calls.setdefault(operation.sequence, {})[rank] = operation
        for sequence, each in sorted(calls.items()):
            lines = {operation.place for operation in each.values()}
            if len(lines) > 1:
                said = "; ".join(f"rank {rank}: {each[rank].name}{at_place(each[rank])}" for rank in sorted(each)[:4])
                return (f"the calls number {sequence} already matched, but came from different lines: {said}",)
        return ()

    def first_time(self, difference: Difference) -> tuple[str, ...]:
        """Who of those whose calls differ had never made such a call from that line, where the others had: they may have parted."""
        new: list[int] = []
        known: list[int] = []
        for operation, ranks in difference.calls:
            calls = recorded_calls(self._groups[difference.group][ranks[0]])
            before = [each for each in calls if each.sequence < difference.sequence]
            alike = (operation.name, operation.sizes, operation.place)
            if len(before) < MIN_CALLS_AFTER:
                return ()
            made = any((each.name, each.sizes, each.place) == alike for each in before)
            (known if made else new).extend(ranks)
        if not new or not known:
            return ()
        return (
            f"{ranks_in_words(new)} made that call for the first time in what is recorded, {ranks_in_words(known)} had made "
            f"{'its' if len(known) == 1 else 'their'} call before",
        )

    def in_collective(self) -> tuple[int, ...]:
        """The ranks that stand in a collective, by their stacks or by torch's own record."""
        return tuple(sorted(rank for rank, view in self.views.items() if self.operation_of(view) is not None))

    def operation_of(self, view: RankView) -> str | None:
        """The collective in which a rank waits, as Python calls it; None where it waits in none as far as seen."""
        named = collective_in(acting_stack(view))
        if named is not None:
            return named
        last = [group.operations[-1] for group in (view.sample.groups if view.sample else ()) if group.operations]
        if not last and not view.activity and in_backward(acting_stack(view)):
            return BACKWARD
        open_calls = [operation for operation in last if operation.state != "done"]
        if open_calls and view.state:
            return open_calls[-1].name
        return EARLIER_CALL if not view.activity and self._in_earlier_call(view) else None

    def decides(self, rank: int) -> bool:
        """Whether it is known of a waiting rank that the others do not wait in the same collective: the wait for one that was
        begun before may be for theirs, unless this rank is ahead in one group and behind in another."""
        return self.operation_of(self.views[rank]) != EARLIER_CALL or self._is_crossed(rank)

    def call_of(self, view: RankView) -> tuple[str, str, int]:
        """The collective in which a rank waits: its name, and its group and number where torch's record tells them."""
        name = self.operation_of(view) or ""
        open_calls = [
            (group.name, group.operations[-1].sequence)
            for group in (view.sample.groups if view.sample else ())
            if group.operations and group.operations[-1].state != "done"
        ]
        return (name, *open_calls[0]) if len(open_calls) == 1 else (name, "", 0)

    def named_peers(self) -> dict[str, tuple[int, ...]]:
        """What ranks name as the sender, or receiver, of a collective in which they wait, the same one by its group and number,
        where they do not agree on it; empty where they do, or where it is not known."""
        groups: dict[tuple[str, str, str, int], dict[str, list[int]]] = {}
        for view in self.views.values():
            name, root = self.operation_of(view), view.sample.root if view.sample else ""
            if name in ROOTED and root:
                given, _, group = root.partition(" in group ")
                sequence = (
                    self._groups[group][view.rank].sequence if view.rank in self._groups.get(group, {}) else -view.rank
                )
                place = (name, given.partition("=")[0], group, sequence)
                groups.setdefault(place, {}).setdefault(given, []).append(view.rank)
        differing = [found for found in groups.values() if len(found) > 1]
        return {root: tuple(ranks) for root, ranks in differing[0].items()} if differing else {}

    def timeout(self) -> float | None:
        """The shortest timeout of torch's own among what is recorded, in seconds."""
        known = [
            group.timeout
            for members in self._groups.values()
            for group in members.values()
            if group.timeout is not None
        ]
        return min(known, default=None)

    def _in_earlier_call(self, view: RankView) -> bool:
        """Whether a rank waits for a collective that it began before, as far as the numbers allow it."""
        stack = acting_stack(view)
        # one that is behind may as well wait for a disk
        allowed = not self._groups_behind(view.rank) or (waits_on_work_handle(stack) and self._is_crossed(view.rank))
        return in_earlier_call(stack, view.waits) and allowed

    def _groups_behind(self, rank: int) -> list[str]:
        """The groups in which a rank has called fewer collectives than another member."""
        return [
            name
            for name, members in self._groups.items()
            if rank in members and members[rank].sequence < max(group.sequence for group in members.values())
        ]

    def _is_crossed(self, rank: int) -> bool:
        """Whether a rank is behind in one group, and nobody is ahead of it in another, where some are behind it."""
        lagging = self._groups_behind(rank)
        leads = any(
            rank in members
            and name not in lagging
            and members[rank].sequence > min(group.sequence for group in members.values())
            for name, members in self._groups.items()
        )
        return bool(lagging) and leads

    def _all_lagging(self) -> Iterator[LaggingRanks]:
        for name, members in sorted(self._groups.items()):
            numbers = {rank: group.sequence for rank, group in members.items()}
            most = max(numbers.values())
            least = min(numbers.values())
            if least < most:
                yield LaggingRanks(
                    group=name,
                    ranks=tuple(sorted(rank for rank, number in numbers.items() if number == least)),
                    sequence=least,
                    waiting=tuple(sorted(rank for rank, number in numbers.items() if number > least)),
                    ahead=most,
                )


def at_place(operation: Operation) -> str:
    """Where a call was made, as the end of a sentence; "" where that is not known."""
    return f" at {frame_text(operation.place[0])}" if operation.place else ""


def sizes_text(operation: Operation, max_tensors: int | None = None) -> str:
    """The sizes of a call's first tensors.

    >>> sizes_text(Operation(sequence=1, name="all_reduce", sizes=((8, 2), ())))
    '8x2 1'
    """
    return " ".join("x".join(map(str, size)) or "1" for size in operation.sizes[:max_tensors])


def recorded_calls(group: GroupState) -> tuple[Operation, ...]:
    """All calls that are recorded of a group on one rank, those of long ago without their types."""
    past = group.history
    if past is None:
        return group.operations
    try:
        packed = base64.b64decode(past.calls)[: MAX_HISTORY * 2]
    except ValueError:  # another node's, or a file's
        return group.operations
    numbers = array.array("H", packed[: len(packed) & ~1])
    known = {operation.sequence for operation in group.operations}
    older = (
        replace(past.kinds[kind], sequence=past.first + number, state="done")
        for number, kind in enumerate(numbers)
        if kind < len(past.kinds) and past.first + number not in known
    )
    return (*older, *group.operations)


def _difference(group: str, sequence: int, calls: dict[int, Operation]) -> Difference | None:
    """How one collective differs between ranks; None where it does not."""
    kinds: dict[tuple[str, Compared], list[int]] = {}
    # types can be why it does not end where all ranks told them, and it has not ended on all of them
    typed = all(each.types for each in calls.values()) and any(each.state != "done" for each in calls.values())
    for rank, operation in calls.items():
        kinds.setdefault((operation.name, _compared(operation, typed=typed)), []).append(rank)
    if len(kinds) < 2:
        return None
    alike = sorted(kinds.values(), key=len)
    return Difference(
        group=group, sequence=sequence, calls=tuple((calls[ranks[0]], tuple(sorted(ranks))) for ranks in alike)
    )


def _compared(operation: Operation, *, typed: bool) -> Compared:
    """The sizes and types that must be equal on all ranks: those of a scatter or a gather to one rank are not."""
    unequal = ("scatter", "gather", "alltoall", "all_to_all")
    exact = operation.name in {"all_gather", "allgather", "reduce_scatter", "_all_gather_base", "_reduce_scatter_base"}
    uneven = any(word in operation.name for word in unequal) and not exact
    return ((), ()) if uneven else (operation.sizes, operation.types if typed else ())
