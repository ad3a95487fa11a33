"""A case -> findings: who does not come and why. Each check is one cause; the first that explains the hang is told. Judges,
never looks.

When one rank fails all others fail to move, so the causes stand in the order in which they explain each other.
"""

from collections.abc import Iterable, Iterator, Mapping

from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.hang.activity import Activity, activity_of, remediation
from dsdoctor.hang.case import Case, polls_child, severity_of, wakes_again_and_again
from dsdoctor.hang.models import PROCESSES, Operation, RankView
from dsdoctor.hang.outside import may_read
from dsdoctor.hang.process_checks import (
    hang_disk_sleep,
    hang_host_gone,
    hang_interpreter_held,
    hang_network_cut,
    hang_rank_gone,
    hang_rank_stopped,
    hang_stale_lock,
)
from dsdoctor.hang.stacks import gathers, ranks_words
from dsdoctor.hang.waiting import EARLIER, Difference, at_place
from dsdoctor.rules import book

CHILDREN = step("ps -o pid,stat,etime,wchan:24,args --ppid {pid}")


def hang_store_unserved(case: Case) -> Iterator[Finding]:
    """All ranks are clients of a store that none of them serves, nor anything else on this host."""
    living = [view for view in case.incident.ranks if view.rank not in case.faulty_ranks]
    addresses = {view.sample.rendezvous for view in living if view.sample}
    if not case.is_whole or len(addresses) != 1 or not all(view.unserved for view in living):
        return
    yield book.finding(
        "hang-store-unserved",
        Severity.ERROR,
        evidence=case.evidence(view.rank for view in living[:4]),
        ranks=ranks_words(view.rank for view in living),
        address=addresses.pop(),
        rank=living[0].rank,
        where=case.where(living[0]),
    )


def hang_not_started(case: Case) -> Iterator[Finding]:
    """Some ranks wait for others at the start, and those have not called init_process_group, or were not heard of."""
    waiting = [view.rank for view in case.starting]
    living = [view for view in case.incident.ranks if view.rank not in case.faulty_ranks]
    outside = [view for view in living if view.rank not in waiting and view not in case.unread]
    late = [view for view in outside if not (view.sample and view.sample.joined)]
    if len(waiting) == case.incident.world > 1 and not case.faulty_ranks:
        yield _start_incomplete(case)
    if not waiting or not (late or case.unknown):
        return
    for view in late:
        fix = remediation(view)
        yield book.finding(
            "hang-not-started",
            severity_of(view),
            case="not-joined",
            evidence=case.evidence([view.rank]),
            steps=fix.steps,
            who=case.rank_label(view.rank),
            again=" again" if view.sample and view.sample.initialized else "",
            where=case.where(view),
            waiting=f"{ranks_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
            advice=fix.text,
        )
    if case.unknown:
        yield book.finding(
            "hang-not-started",
            # a rank that starts others itself, as Lightning does, has them for children, which import torch
            severity_of(*case.starting),
            case="" if len(case.unknown) == 1 else "ranks",
            evidence=case.evidence(waiting[:1]),
            ranks=ranks_words(case.unknown),
            world=case.incident.world,
            waiting=f"{ranks_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
        )


def _start_incomplete(case: Case) -> Finding:
    """All ranks have come to the start, and it does not end: they do not find each other, or no connection comes about."""
    addresses = {view.rank: view.sample.rendezvous for view in case.starting if view.sample and view.sample.rendezvous}
    again = any(view.sample and view.sample.initialized for view in case.starting)
    return book.finding(
        "hang-not-started",
        severity_of(*case.starting),
        case="all-again" if again else "all",
        evidence=(
            *(f"{ranks_words(ranks)} at the store {address}" for address, ranks in _by_value(addresses).items()),
            *case.evidence(view.rank for view in case.starting[:2]),
        ),
        world=case.incident.world,
        rank=case.starting[0].rank,
        where=case.where(case.starting[0]),
    )


def _by_value(named: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in named.items():
        found.setdefault(value, []).append(rank)
    return found


def hang_other_operation(case: Case) -> Iterator[Finding]:
    """The ranks of a group called different collectives at the same place in their order, or one with different senders."""
    differences = [each for each in case.waiting.differences() if each.parted]
    for difference in differences:
        yield book.finding(
            "hang-other-operation",
            Severity.ERROR,
            case="other-sizes" if difference.same_name else "",
            evidence=_difference_evidence(case, difference),
            group=difference.group,
            number=difference.sequence,
            calls=_calls(difference),
            now=_now(case, difference),
            gathering=_gathering(case, (rank for _, ranks in difference.calls for rank in ranks)),
        )
    living = [rank for rank in case.views if rank not in case.faulty_ranks]
    calls = {case.waiting.call_of(case.views[rank]) for rank in case.waiting_ranks if case.waiting.decides(rank)}
    alone = not differences and not case.starting and len(case.waiting_ranks) == len(living)
    if (roots := case.waiting.named_peers()) and not differences:
        yield _other_root(case, roots)
    # of running processes some may not have been named: those in another collective may wait for these
    if alone and len(calls) > 1 and (case.is_whole or case.incident.source != PROCESSES):
        yield _in_different(case)


def hang_other_sizes(case: Case) -> Iterator[Finding]:
    """The ranks of a group called the same collective with tensors of other sizes, or of another type."""
    for difference in case.waiting.differences():
        if not difference.parted:
            yield book.finding(
                "hang-other-sizes",
                Severity.ERROR,
                case="other-types" if difference.same_sizes else "",
                evidence=_difference_evidence(case, difference),
                group=difference.group,
                number=difference.sequence,
                calls=_calls(difference),
                now=_now(case, difference),
            )


def _steps_of(view: RankView, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The commands for a rank that others wait for."""
    if view.activity:
        return ()
    return (CHILDREN.filled({"pid": str(view.pid)}),) if polls_child(view) else steps


def hang_rank_behind(case: Case) -> Iterator[Finding]:
    """A rank has called fewer collectives than the others, which wait for it."""
    told: set[int] = set(case.faulty_ranks)
    for behind in case.waiting.behind():
        for rank in sorted(set(behind.ranks) - told):
            told.add(rank)
            view = case.views[rank]
            fix = remediation(view)
            yield book.finding(
                "hang-rank-behind",
                severity_of(view),
                case="working" if view.activity else "polls" if polls_child(view) else "" if view.sample else "silent",
                evidence=(
                    f"rank {rank}: collective {behind.sequence} of {behind.ahead} in group {behind.group}",
                    *case.evidence([rank]),
                ),
                steps=_steps_of(view, fix.steps),
                who=case.rank_label(rank),
                where=case.where(view),
                others=_while_others(case, view, behind.waiting),
                advice=fix.text,
            )


def hang_rank_outside(case: Case) -> Iterator[Finding]:
    """All ranks have called as many collectives, some wait in one, and others stand elsewhere."""
    waiting = case.waiting_ranks
    if not waiting:
        return
    for view in case.incident.ranks:
        gone = view.rank in case.faulty_ranks or view.rank in waiting or view in (*case.unread, *case.undecided)
        if not gone and not (view.sample and view.sample.leaving):
            fix = remediation(view)
            yield book.finding(
                "hang-rank-outside",
                severity_of(view),
                case="working" if view.activity else "polls" if polls_child(view) else "" if view.sample else "silent",
                evidence=(
                    *([f"rank {view.rank}: not in a collective"] if view.sample else []),
                    *case.evidence([view.rank]),
                ),
                steps=_steps_of(view, fix.steps),
                who=case.rank_label(view.rank),
                where=case.where(view),
                others=_while_others(case, view, waiting),
                advice=fix.text,
            )


def hang_transport(case: Case) -> Iterator[Finding]:
    """All ranks have come to the same collective, with the same sizes, and it does not end."""
    waiting = case.waiting_ranks
    everybody = len(case.views) == case.incident.world and len(waiting) == len(case.views)
    names = {case.waiting.operation_of(case.views[rank]) for rank in waiting}
    # without numbers it may be another collective of the same name
    counted = any(view.sample and view.sample.groups for view in case.incident.ranks)
    # a wait for what was begun before may be for a receive that nobody sends to, or for no collective at all
    if not everybody or not counted or len(waiting) < 2 or len(names) > 1 or EARLIER in names:
        return
    yield book.finding(
        "hang-transport",
        severity_of(*case.views.values()),
        evidence=(*case.incident.nccl, *case.evidence(waiting[:1])),
        count=len(waiting),
        collective=names.pop(),
    )


def hang_all_outside(case: Case) -> Iterator[Finding]:
    """No rank stands in a collective, and none moves."""
    living = [view for view in case.incident.ranks if view.rank not in case.faulty_ranks]
    # where some have come to their end the training is over, and the rest may take its time
    if case.waiting_ranks or not living or not case.joined or case.dead:
        return
    # one that was not heard of may wait in a collective; and where all work for themselves nothing hangs
    if not case.is_whole or case.is_long_step or case.undecided:
        return
    first = living[0]
    fix = remediation(first)
    # workers that only wait may read from far away; nobody waits for a rank that goes round a loop of its own
    may_go_on = all(map(may_read, living)) or any(map(wakes_again_and_again, living))
    yield book.finding(
        "hang-all-outside",
        Severity.WARNING if may_go_on else severity_of(*living),
        case="" if len(living) > 1 else "one",
        evidence=case.evidence([view.rank for view in living[:4]]),
        steps=fix.steps,
        ranks=ranks_words(view.rank for view in living),
        rank=first.rank,
        where=case.where(first),
        advice=fix.text,
    )


def hang_at_exit(case: Case) -> Iterator[Finding]:
    """The training is over, and a rank does not end: it has destroyed its process groups, or its script has ended."""
    for view in case.past_the_end:
        if view.activity or view.sample is None:
            continue
        fix = remediation(view)
        over = view.sample.leaving or activity_of(view).kind is Activity.SCRIPT_ENDED
        yield book.finding(
            "hang-at-exit",
            # a script that goes on after its group may upload, merge or serve what it has trained: no rank waits for that
            Severity.ERROR if over or activity_of(view).waits_for_thread else Severity.WARNING,
            case="leaving" if view.sample.leaving else "" if over else "left-group",
            evidence=case.evidence([view.rank]),
            steps=fix.steps,
            who=case.rank_label(view.rank),
            where=case.where(view),
            advice=fix.text,
        )


def _while_others(case: Case, view: RankView, waiting: tuple[int, ...]) -> str:
    """What the others do meanwhile, as the end of a sentence."""
    if waits := case.waits_words([view.rank]):
        return waits
    return f"{ranks_words(waiting)} {'is' if len(waiting) == 1 else 'are'} ahead"


def _in_different(case: Case) -> Finding:
    """All wait, each for ranks that wait elsewhere."""
    calls: dict[tuple[str, str, int], list[int]] = {}
    for rank in case.waiting_ranks:
        calls.setdefault(case.waiting.call_of(case.views[rank]), []).append(rank)
    fewest_first = sorted(calls.items(), key=lambda item: (len(item[1]), item[1]))
    few = fewest_first[0][1]
    return book.finding(
        "hang-other-operation",
        Severity.ERROR,
        case="each-in-another",
        evidence=(*_fewer(case, few[0]), *_places(case, case.waiting_ranks), *case.evidence(few[:2])),
        calls="; ".join(
            f"{ranks_words(ranks)} in {name}{f' (number {number} of group {group})' if group else ''}"
            for (name, group, number), ranks in fewest_first
        ),
        rank=few[0],
        where=case.where(case.views[few[0]]),
        gathering=_gathering(case, case.waiting_ranks),
    )


def _fewer(case: Case, rank: int) -> Iterator[str]:
    """Where a rank has called fewer collectives of a group than others that wait in it: its line may only follow."""
    for behind in case.waiting.behind():
        if rank in behind.ranks and set(behind.waiting) & set(case.waiting_ranks):
            yield (
                f"rank {rank} has called {behind.sequence} collectives of group {behind.group}, {ranks_words(behind.waiting)} "
                f"{behind.ahead}: {book.phrase('hang', 'fewer-calls')}"
            )


def _other_root(case: Case, roots: dict[str, tuple[int, ...]]) -> Finding:
    """All are in one collective, and do not agree on who sends or receives."""
    fewest_first = sorted(roots.items(), key=lambda item: (len(item[1]), item[1]))
    few = fewest_first[0][1]
    return book.finding(
        "hang-other-operation",
        Severity.ERROR,
        case="other-root",
        evidence=(*_places(case, case.waiting_ranks), *case.evidence(few[:2])),
        calls="; ".join(f"{ranks_words(ranks)}: {root}" for root, ranks in fewest_first),
        rank=few[0],
        where=case.where(case.views[few[0]]),
    )


def _calls(difference: Difference) -> str:
    """What the ranks of a group called, those with the same call together."""
    typed = difference.same_sizes
    return "; ".join(f"{ranks_words(ranks)}: {_call(operation, typed)}" for operation, ranks in difference.calls)


def _now(case: Case, difference: Difference) -> str:
    """Where the first of the fewest is now, as the end of a sentence; "" where it does not run any more."""
    rank = difference.calls[0][1][0]
    return "" if rank in case.faulty_ranks else f"; rank {rank} now {case.where(case.views[rank])}"


def _difference_evidence(case: Case, difference: Difference) -> Iterator[str]:
    ranks = [rank for _, ranks in difference.calls for rank in ranks]
    yield from case.waiting.before(difference)
    yield from case.waiting.first_time(difference)
    yield from _ended(case, ranks)
    yield from _places(case, [rank for rank in ranks if rank not in case.faulty_ranks])
    yield from case.evidence(difference.calls[0][1][:2])


def _gathering(case: Case, ranks: Iterable[int]) -> str:
    """What else ZeRO-3 asks of ranks that took different branches."""
    together = any(gathers(case.views[rank]) for rank in ranks if rank in case.views)
    return book.phrase("hang", "zero3-gathers") if together else ""


def _places(case: Case, ranks: tuple[int, ...] | list[int]) -> tuple[str, ...]:
    """Where ranks stand now, equal places together."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in case.views:
            places.setdefault(case.where(case.views[rank]), []).append(rank)
    return tuple(f"{ranks_words(members)} now: {where}" for where, members in places.items())


def _ended(case: Case, ranks: Iterable[int]) -> Iterator[str]:
    """How those of some ranks ended that have."""
    for rank in ranks:
        view = case.views[rank]
        if view.ended:
            after = f" after {view.sample.failure}" if view.sample and view.sample.failure else ""
            yield f"rank {rank} ended: {view.ended}{after}"


def _call(operation: Operation, typed: bool) -> str:
    sizes = " ".join("x".join(map(str, each)) or "1" for each in operation.sizes)
    sizes += f" {' '.join(dict.fromkeys(operation.types))}" if typed else ""
    return (f"{operation.name} of {sizes}" if sizes else operation.name) + at_place(operation)


CHECKS = (
    hang_rank_gone,
    hang_rank_stopped,
    hang_host_gone,
    hang_network_cut,
    hang_disk_sleep,
    hang_interpreter_held,
    hang_stale_lock,
    hang_store_unserved,
    hang_not_started,
    hang_other_operation,
    hang_other_sizes,
    hang_rank_behind,
    hang_rank_outside,
    hang_transport,
    hang_at_exit,
    hang_all_outside,
)
