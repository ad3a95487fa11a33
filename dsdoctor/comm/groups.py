"""Nodes -> rounds of disjoint groups, each chosen by what the rounds before it showed, and what follows from all. Pure.

A pair that fails says nothing of which of the two is bad, or whether it is the path between them: each is tried again with nodes
that were well in other pairs. With n nodes of which few are bad it takes log2(n) + 3 rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dsdoctor.comm.torch_ops import one_round

Part = tuple[int, ...]
"""The ranks of a node; of a single node each rank is one."""
Groups = tuple[tuple[Part, ...], ...]
FEWEST_PAIRS = 3
"""With fewer pairs none shows what is usual."""
MOST_WAVES = 4
"""Rounds in which nodes of failed pairs are tried again: with more bad nodes than good ones it takes several."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A round: which groups of nodes exchanged at the same time, and which of them failed; ``figures`` say how fast each was."""

    what: str
    groups: Groups
    failed: Groups
    figures: dict[tuple[Part, ...], float] = field(default_factory=dict)

    @property
    def well(self) -> Groups:
        """The groups that did not fail."""
        return tuple(group for group in self.groups if group not in self.failed)


Run = Callable[[str, Groups], Trial | None]
"""Plays a round; None where no time is left."""


Judge = Callable[[tuple[Trial, ...]], tuple[Trial, ...]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the rounds showed, as far as they decide it. ``bad`` failed alone, or with two that are well; ``paths`` are pairs that
    fail while both are well with others."""

    trials: tuple[Trial, ...]

    @cached_property
    def good(self) -> set[Part]:
        """Those that were well together with another."""
        return {part for trial in self.trials for group in trial.well if len(group) > 1 for part in group}

    @cached_property
    def failing(self) -> tuple[tuple[Part, ...], ...]:
        """Every group that failed, of at most two nodes."""
        return tuple(group for trial in self.trials for group in trial.failed if len(group) < 3)

    @cached_property
    def bad(self) -> tuple[Part, ...]:
        """The nodes that are at fault."""
        good, failed_with = self.good, self.failed_with
        alone = {group[0] for group in self.failing if len(group) == 1}
        return tuple(
            sorted(alone | {part for part in failed_with if part not in good and len(failed_with[part] & good) > 1})
        )

    @cached_property
    def failed_with(self) -> dict[Part, set[Part]]:
        """By node: those with which it failed in a pair."""
        found: dict[Part, set[Part]] = {}
        for group in self.failing:
            for part in group:
                found.setdefault(part, set()).update({*group} - {part})
        return found

    @cached_property
    def paths(self) -> tuple[tuple[Part, ...], ...]:
        """The pairs between which something is at fault."""
        ends, well = self.good - {*self.bad}, {group for trial in self.trials for group in trial.well}
        found = (group for group in self.failing if len(group) == 2 and {*group} <= ends and group not in well)
        return tuple(dict.fromkeys(found))

    @cached_property
    def least_failing(self) -> int:
        """The size of the smallest groups that failed although all their nodes are well in pairs; 0 where none did."""
        good = self.good - {*self.bad}
        well = {group for trial in self.trials for group in trial.well}
        failed = (group for trial in self.trials for group in trial.failed if len(group) > 2 and group not in well)
        return min((len(group) for group in failed if {*group} <= good), default=0)


def play(parts: Sequence[Part], run: Run, judge: Judge = tuple) -> Outcome:
    """Each node alone, pairs at once, the nodes of failed pairs with good ones, then groups of four, eight and so on.

    ``judge`` says anew after each round which groups of all rounds failed, where that shows only beside the others.
    """
    trials: list[Trial] = []

    def tried(what: str, groups: Sequence[Sequence[Part]]) -> bool:
        trial = run(what, tuple(map(tuple, groups))) if groups else None
        if trial is not None:
            trials[:] = judge((*trials, trial))
        return trial is not None or not groups

    if not tried("each node by itself", [(part,) for part in parts if len(part) > 1]):
        return Outcome(trials=tuple(trials))
    bad = {*Outcome(trials=tuple(trials)).bad}
    left = [part for part in parts if part not in bad]
    for what, groups in _pairings(left, trials):
        if not tried(what, groups):
            return Outcome(trials=tuple(trials))
    for size in _sizes(len(left)):
        good = Outcome(trials=tuple(trials)).good
        groups = _cut([part for part in left if part in good], size)
        if not tried(f"groups of {size}", groups) or not groups:
            break
        if trials[-1].failed and (not tried(f"groups of {size}, again", groups) or trials[-1].failed):
            break
    return Outcome(trials=tuple(trials))


def _pairings(parts: Sequence[Part], trials: list[Trial]) -> Iterator[tuple[str, Groups]]:
    """Pairs of all, again where none was well; then those that are not decided, each with one that is well."""
    for turn in range(min(max(len(parts).bit_length(), FEWEST_PAIRS), len(parts) - 1 + len(parts) % 2)):
        yield "in pairs", tuple((parts[first], parts[second]) for first, second in one_round(len(parts), turn))
        if Outcome(trials=tuple(trials)).good and _pairs_of(trials) >= FEWEST_PAIRS:
            break
    for _ in range(MOST_WAVES):
        outcome = Outcome(trials=tuple(trials))
        decided = outcome.good | {*outcome.bad}
        open_ = [part for part in parts if part not in decided]
        good = [part for part in parts if part in outcome.good]
        matched = tuple(_matched(open_, good, outcome.failed_with))
        if not matched:
            break
        yield "again, each with one that is well", _with_others(matched, outcome.good)
    outcome = Outcome(trials=tuple(trials))
    yield "pairs that failed, again", _with_others(tuple(_apart(outcome.paths)), outcome.good)


def _with_others(pairs: tuple[tuple[Part, ...], ...], good: set[Part]) -> Groups:
    """The pairs, and pairs of the others that are well beside them: as many at the same time as before, so that figures compare."""
    rest = sorted(good - {part for pair in pairs for part in pair})
    return (*pairs, *zip(rest[::2], rest[1::2], strict=False)) if pairs else ()


def _apart(pairs: Sequence[tuple[Part, ...]]) -> Iterator[tuple[Part, ...]]:
    """Those of which no node is in two."""
    taken: set[Part] = set()
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            yield pair


def _pairs_of(trials: Sequence[Trial]) -> int:
    return sum(len(group) == 2 for trial in trials for group in trial.groups)


def _matched(
    open_: Sequence[Part], good: list[Part], failed_with: dict[Part, set[Part]]
) -> Iterator[tuple[Part, Part]]:
    """Each that is not decided with a good one that it was not with, as far as there are enough."""
    for part in open_:
        partner = next((one for one in good if one not in failed_with.get(part, ())), None)
        if partner is not None:
            good.remove(partner)
            yield part, partner


def _sizes(count: int) -> Iterator[int]:
    """Four, eight and so on, less than all.

    >>> list(_sizes(17)), list(_sizes(4))
    ([4, 8, 16], [])
    """
    size = 4
    while size < count:
        yield size
        size *= 2


def _cut(parts: Sequence[Part], size: int) -> Groups:
    return tuple(tuple(parts[start : start + size]) for start in range(0, len(parts) - size + 1, size))
