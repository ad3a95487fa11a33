"""An incident -> findings: which rank is missing and why, or what is the matter with its process. Each check is one cause; the
first that explains the hang is told. Judges, never looks.

When one rank fails all others fail to move, so the causes stand in the order in which they explain each other.
"""

from collections.abc import Iterable, Iterator

from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.activity import Activity, activity_of, remediation
from dsdoctor.hang.incident_view import (
    CRASHES,
    EXIT_STATUS,
    QUIET,
    IncidentView,
    is_terminated_on_request,
    polls_child,
    signal_of,
    wakes_again_and_again,
)
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, RankView
from dsdoctor.hang.outside import NOT_INSTALLED, REFUSED, may_read
from dsdoctor.hang.stacks import acting_stack, frame_text, gathers, own_frame
from dsdoctor.hang.waiting import EARLIER_CALL, Difference, at_place, sizes_text
from dsdoctor.ranks.nodelist import ranks_in_words
from dsdoctor.rules import book

ERROR = Severity.ERROR
CHILDREN = step("ps -o pid,stat,etime,wchan:24,args --ppid {pid}")


def hang_rank_gone(run: IncidentView) -> Iterator[Finding]:
    """The process of a rank has ended, and the other ranks wait for it."""
    first = run.incident.first_ended
    parted = {rank for each in run.waiting.differences() for _, ranks in each.calls for rank in ranks}
    for view in run.dead:
        follows = first or (not run.waiting_ranks and run.incident.source != PROCESSES)
        # a rank that came to its end after it had parted from the others is not at fault
        if (view.rank not in first and follows) or (view.ended == QUIET and view.rank in parted):
            continue
        sample = view.sample
        signal = signal_of(view)
        others = run.waits_words()
        yield book.finding(
            "hang-rank-gone",
            Severity.WARNING if is_terminated_on_request(view) else ERROR,
            case="killed"
            if signal == "SIGKILL"
            else "aborted"
            if signal == "SIGABRT"
            else "crashed"
            if signal in CRASHES
            else "asked"
            if is_terminated_on_request(view)
            else ""
            if signal
            else "waited-for"
            if view.ended == QUIET and others
            else "over"
            if view.ended == QUIET
            else "raised"
            if sample and sample.failure
            else "exited"
            if view.ended.startswith(EXIT_STATUS)
            else "",
            evidence=(*_fewer_calls(run, view), *_last_called(run, view), *run.evidence([view.rank])),
            who=run.rank_label(view.rank),
            how=view.ended,
            failure=f" after {sample.failure}" if sample and sample.failure else "",
            others=others,
            rank=view.rank,
            example=next((f", such as {call}" for other in _others(run, view) for call in _last_call(other)), ""),
            gathering=_gathering(run, run.views),
        )


def _others(run: IncidentView, view: RankView) -> tuple[RankView, ...]:
    return tuple(run.views[rank] for rank in sorted(run.views) if rank != view.rank)


def _last_called(run: IncidentView, view: RankView) -> Iterator[str]:
    """What the others had called when a rank ended itself: it may have met another collective."""
    for other in _others(run, view)[:4] if view.ended.endswith("SIGABRT") else ():
        for call in _last_call(other):
            yield f"rank {other.rank} last called {call.removesuffix(f' on rank {other.rank}')}"


def _fewer_calls(run: IncidentView, view: RankView) -> Iterator[str]:
    """How many collectives a rank that came to its regular end had called, where others have called more."""
    if view.ended != QUIET or view.sample is None:
        return
    for group in view.sample.groups:
        others = {
            each.sequence: rank
            for rank, other in run.views.items()
            for each in (other.sample.groups if other.sample and rank != view.rank else ())
            if each.name == group.name and each.sequence > group.sequence
        }
        if others:
            most = max(others)
            yield (
                f"rank {view.rank} had called {group.sequence} collectives of group {group.name} when it ended, "
                f"rank {others[most]} {most}"
            )


def _last_call(view: RankView) -> Iterator[str]:
    """The last collective of a rank with its line, where that is known."""
    calls = [each for group in (view.sample.groups if view.sample else ()) for each in group.operations if each.place]
    if calls:
        last = max(calls, key=lambda each: each.called)
        yield f"{last.name}{at_place(last)} on rank {view.rank}"
    elif view.sample and (own := own_frame(view.sample.failed_in, only=True)):
        yield f"the call at {frame_text(own)} on rank {view.rank}"


def hang_rank_stopped(run: IncidentView) -> Iterator[Finding]:
    """The process of a rank is stopped: by a signal (Ctrl-Z, a scheduler that suspends) or by a debugger."""
    for view in run.stopped:
        yield book.finding(
            "hang-rank-stopped",
            ERROR,
            evidence=run.evidence([view.rank]),
            who=run.rank_label(view.rank),
            state=LETTERS[view.state],
            others=_others_wait(run),
            host=view.host,
            pid=view.pid,
        )


def hang_disk_sleep(run: IncidentView) -> Iterator[Finding]:
    """The process of a rank waits in the kernel for a disk, a network file system or a driver, and cannot be interrupted."""
    for view in run.sleeping:
        yield book.finding(
            "hang-disk-sleep",
            run.severity_of(view),
            evidence=run.evidence([view.rank]),
            who=run.rank_label(view.rank),
            state=LETTERS["D"],
            where=run.where(view),
            others=_others_wait(run),
            host=view.host,
            disk=view.disk,
            pid=view.pid,
        )


def hang_host_gone(run: IncidentView) -> Iterator[Finding]:
    """A node is not reached any more, or the watch there has ended, and nothing moves."""
    for host, ranks in sorted(run.incident.silent_hosts.items()):
        if not set(ranks) <= set(run.views):
            yield book.finding(
                "hang-host-gone",
                ERROR,
                evidence=run.evidence(()),
                node=host,
                ranks=ranks_in_words(ranks),
                others=_others_wait(run),
                host=host.partition("/")[0],
            )
    for host, ranks in sorted(run.incident.left_hosts.items()):
        yield book.finding(
            "hang-host-gone",
            ERROR,
            case="one-rank-ended" if len(ranks) == 1 else "ranks-ended",
            evidence=run.evidence(()),
            node=host,
            ranks=ranks_in_words(ranks),
            others=_others_wait(run),
        )


def hang_network_cut(run: IncidentView) -> Iterator[Finding]:
    """Two nodes of a run do not reach each other, and the ranks of both are there."""
    for host, ranks in sorted(run.incident.silent_hosts.items()):
        if set(ranks) <= set(run.views) and not any(rank in run.faulty_ranks for rank in ranks):
            yield book.finding(
                "hang-network-cut",
                ERROR,
                evidence=run.evidence(()),
                node=host,
                ranks=ranks_in_words(ranks),
                others=_others_wait(run),
                host=host.partition("/")[0],
            )
            return


def hang_interpreter_held(run: IncidentView) -> Iterator[Finding]:
    """On a rank no Python code has run for a while: C code holds the interpreter's lock (the GIL)."""
    for view in run.gil_blocked:
        yield book.finding(
            "hang-interpreter-held",
            run.severity_of(view),
            evidence=run.evidence([view.rank]),
            who=run.rank_label(view.rank),
            seconds=f"{view.silent:.0f}",
            where=run.where(view),
            others=_others_wait(run),
            pid=view.pid,
        )


def hang_stale_lock(run: IncidentView) -> Iterator[Finding]:
    """A rank waits for the lock of a torch extension that no living process holds."""
    locks = {
        view.lock.path: view
        for view in run.incident.ranks
        if view.lock and view.lock.holder.pid is None and not view.lock.holder.doubt
    }
    # one of the ranks that wait for no lock, on any node, may be compiling
    others = (view for view in run.incident.ranks if view.lock is None and view.rank not in run.faulty_ranks)
    if any("/torch/utils/cpp_extension.py" in frame.file for view in others for frame in acting_stack(view)[-6:]):
        return
    for path, first in locks.items():
        ranks = [view.rank for view in run.incident.ranks if view.lock and view.lock.path == path]
        yield book.finding(
            "hang-stale-lock",
            ERROR,
            case="" if len(ranks) == 1 else "ranks",
            evidence=(f"the lock is {first.lock.age / 60:.0f} minutes old", *run.evidence([first.rank]))
            if first.lock
            else (),
            ranks=ranks_in_words(ranks),
            path=path,
            host=first.host,
        )


def hang_stacks_unread(run: IncidentView) -> Iterator[Finding]:
    """The stacks of running processes could not be read, so what they wait for is not known."""
    reasons: dict[str, list[int]] = {}
    for view in run.unread:
        reasons.setdefault(view.unread, []).append(view.rank)
    for reason, ranks in reasons.items():
        waits = run.waits_words(ranks)
        yield book.finding(
            "hang-stacks-unread",
            Severity.WARNING,
            case="not-installed"
            if reason == NOT_INSTALLED
            else "refused"
            if reason == REFUSED
            else "not-looked"
            if reason == NOT_LOOKED
            else "",
            evidence=(
                *(_without_stacks(run.views[rank]) for rank in ranks[:4]),
                *([waits] if waits and reason == NOT_LOOKED else []),
            ),
            ranks=ranks_in_words(ranks),
            reason=reason,
            pid=run.views[ranks[0]].pid,
        )


def _without_stacks(view: RankView) -> str:
    """What is seen of a process whose stacks could not be read."""
    words = [
        LETTERS.get(view.state, view.state),
        *([f"in the kernel: {view.waits}"] if view.waits else []),
        view.activity,
        f"its last sample is {view.age:.0f} s old" if view.unread == NOT_LOOKED else "",
    ]
    return f"rank {view.rank} (pid {view.pid}): {', '.join(word for word in words if word)}"


def _others_wait(run: IncidentView) -> str:
    words = run.waits_words()
    return f"; {words}" if words else ""


def hang_store_unserved(run: IncidentView) -> Iterator[Finding]:
    """All ranks are clients of a store that none of them serves, nor anything else on this host."""
    living = [view for view in run.incident.ranks if view.rank not in run.faulty_ranks]
    addresses = {view.sample.rendezvous for view in living if view.sample}
    if not run.is_whole or len(addresses) != 1 or not all(view.unserved for view in living):
        return
    yield book.finding(
        "hang-store-unserved",
        ERROR,
        evidence=run.evidence(view.rank for view in living[:4]),
        ranks=ranks_in_words(view.rank for view in living),
        address=addresses.pop(),
        rank=living[0].rank,
        where=run.where(living[0]),
    )


def hang_not_started(run: IncidentView) -> Iterator[Finding]:
    """Some ranks wait for others at the start, and those have not called init_process_group, or were not heard of."""
    waiting = [view.rank for view in run.starting]
    living = [view for view in run.incident.ranks if view.rank not in run.faulty_ranks]
    outside = [view for view in living if view.rank not in waiting and view not in run.unread]
    late = [view for view in outside if not (view.sample and view.sample.joined)]
    if len(waiting) == run.incident.world > 1 and not run.faulty_ranks:
        yield _start_incomplete(run)
    if not waiting or not (late or run.unknown):
        return
    for view in late:
        fix = remediation(view)
        yield book.finding(
            "hang-not-started",
            run.severity_of(view),
            case="late" if _is_late(run, view) else "not-joined",
            evidence=(*run.evidence([view.rank]), *_lateness(run, view)),
            steps=fix.steps,
            who=run.rank_label(view.rank),
            again=" again" if view.sample and view.sample.initialized else "",
            where=run.where(view),
            seconds=f"{run.incident.still:.0f}",
            waiting=f"{ranks_in_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
            advice=fix.text,
        )
    if run.unknown:
        yield book.finding(
            "hang-not-started",
            # a rank that starts others itself, as Lightning does, has them for children, which import torch
            run.severity_of(*run.starting),
            case="" if len(run.unknown) == 1 else "ranks",
            evidence=run.evidence(waiting[:1]),
            ranks=ranks_in_words(run.unknown),
            world=run.incident.world,
            waiting=f"{ranks_in_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
        )


def _start_incomplete(run: IncidentView) -> Finding:
    """All ranks have come to the start, and it does not end: they do not find each other, or no connection comes about."""
    addresses: dict[str, list[int]] = {}
    for view in run.starting:
        if view.sample and view.sample.rendezvous:
            addresses.setdefault(view.sample.rendezvous, []).append(view.rank)
    again = any(view.sample and view.sample.initialized for view in run.starting)
    return book.finding(
        "hang-not-started",
        run.severity_of(*run.starting),
        case="all-again" if again else "all",
        evidence=(
            *(f"{ranks_in_words(ranks)} at the store {address}" for address, ranks in addresses.items()),
            *run.evidence(view.rank for view in run.starting[:2]),
        ),
        world=run.incident.world,
        rank=run.starting[0].rank,
        where=run.where(run.starting[0]),
    )


def hang_other_operation(run: IncidentView) -> Iterator[Finding]:
    """The ranks of a group called different collectives at the same place in their order, or one with different senders."""
    differences = [each for each in run.waiting.differences() if each.parted]
    for difference in differences:
        yield book.finding(
            "hang-other-operation",
            ERROR,
            case="other-sizes" if difference.same_name else "",
            evidence=_difference_evidence(run, difference),
            group=difference.group,
            number=difference.sequence,
            calls=_calls(difference),
            now=_now(run, difference),
            gathering=_gathering(run, (rank for _, ranks in difference.calls for rank in ranks)),
        )
    living = [rank for rank in run.views if rank not in run.faulty_ranks]
    calls = {run.waiting.call_of(run.views[rank]) for rank in run.waiting_ranks if run.waiting.decides(rank)}
    alone = not differences and not run.starting and len(run.waiting_ranks) == len(living)
    if (roots := run.waiting.named_peers()) and not differences:
        yield _other_root(run, roots)
    # of running processes some may not have been named: those in another collective may wait for these
    if alone and len(calls) > 1 and (run.is_whole or run.incident.source != PROCESSES):
        yield _in_different(run)


def hang_other_sizes(run: IncidentView) -> Iterator[Finding]:
    """The ranks of a group called the same collective with tensors of other sizes, or of another type."""
    for difference in run.waiting.differences():
        if not difference.parted:
            yield book.finding(
                "hang-other-sizes",
                ERROR,
                case="other-types" if difference.same_sizes else "",
                evidence=_difference_evidence(run, difference),
                group=difference.group,
                number=difference.sequence,
                calls=_calls(difference),
                now=_now(run, difference),
            )


def _steps_of(view: RankView, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The commands for a rank that others wait for."""
    if view.activity:
        return ()
    return (CHILDREN.filled({"pid": str(view.pid)}),) if polls_child(view) else steps


def _is_late(run: IncidentView, view: RankView) -> bool:
    """Whether a rank that others wait for is still, and may come by itself."""
    return run.is_late and not view.activity and run.severity_of(view) is Severity.WARNING


def _lateness(run: IncidentView, view: RankView) -> tuple[str, ...]:
    return run.lateness() if _is_late(run, view) else ()


def hang_rank_behind(run: IncidentView) -> Iterator[Finding]:
    """A rank has called fewer collectives than the others, which wait for it."""
    told: set[int] = set(run.faulty_ranks)
    for behind in run.waiting.lagging():
        for rank in sorted(set(behind.ranks) - told):
            told.add(rank)
            view = run.views[rank]
            fix = remediation(view)
            yield book.finding(
                "hang-rank-behind",
                run.severity_of(view),
                case="working"
                if view.activity
                else "polls"
                if polls_child(view)
                else "silent"
                if view.sample is None
                else "late"
                if _is_late(run, view)
                else "",
                evidence=(
                    f"rank {rank}: collective {behind.sequence} of {behind.ahead} in group {behind.group}",
                    *run.evidence([rank]),
                    *_lateness(run, view),
                ),
                steps=_steps_of(view, fix.steps),
                who=run.rank_label(rank),
                where=run.where(view),
                seconds=f"{run.incident.still:.0f}",
                others=_while_others(run, view, behind.waiting),
                advice=fix.text,
            )


def hang_rank_outside(run: IncidentView) -> Iterator[Finding]:
    """All ranks have called as many collectives, some wait in one, and others stand elsewhere."""
    waiting = run.waiting_ranks
    if not waiting:
        return
    for view in run.incident.ranks:
        gone = view.rank in run.faulty_ranks or view.rank in waiting or view in (*run.unread, *run.undecided)
        if not gone and not (view.sample and view.sample.leaving):
            fix = remediation(view)
            yield book.finding(
                "hang-rank-outside",
                run.severity_of(view),
                case="working"
                if view.activity
                else "polls"
                if polls_child(view)
                else "silent"
                if view.sample is None
                else "late"
                if _is_late(run, view)
                else "",
                evidence=(
                    *([f"rank {view.rank}: not in a collective"] if view.sample else []),
                    *run.evidence([view.rank]),
                    *_lateness(run, view),
                ),
                steps=_steps_of(view, fix.steps),
                who=run.rank_label(view.rank),
                where=run.where(view),
                seconds=f"{run.incident.still:.0f}",
                others=_while_others(run, view, waiting),
                advice=fix.text,
            )


def hang_transport(run: IncidentView) -> Iterator[Finding]:
    """All ranks have come to the same collective, with the same sizes, and it does not end."""
    waiting = run.waiting_ranks
    everybody = len(run.views) == run.incident.world and len(waiting) == len(run.views)
    names = {run.waiting.operation_of(run.views[rank]) for rank in waiting}
    # without numbers it may be another collective of the same name
    counted = any(view.sample and view.sample.groups for view in run.incident.ranks)
    # a wait for what was begun before may be for a receive that nobody sends to, or for no collective at all
    if not everybody or not counted or len(waiting) < 2 or len(names) > 1 or EARLIER_CALL in names:
        return
    yield book.finding(
        "hang-transport",
        run.severity_of(*run.views.values()),
        evidence=(*run.incident.nccl, *run.evidence(waiting[:1])),
        count=len(waiting),
        collective=names.pop(),
    )


def hang_all_outside(run: IncidentView) -> Iterator[Finding]:
    """No rank stands in a collective, and none moves."""
    living = [view for view in run.incident.ranks if view.rank not in run.faulty_ranks]
    # where some have come to their end the training is over, and the rest may take its time
    if run.waiting_ranks or not living or not run.joined or run.dead:
        return
    # one that was not heard of may wait in a collective; and where all work for themselves nothing hangs
    if not run.is_whole or run.is_long_step or run.undecided:
        return
    first = living[0]
    fix = remediation(first)
    # workers that only wait may read from far away; nobody waits for a rank that goes round a loop of its own
    may_go_on = all(map(may_read, living)) or any(map(wakes_again_and_again, living))
    yield book.finding(
        "hang-all-outside",
        Severity.WARNING if may_go_on else run.severity_of(*living),
        case="" if len(living) > 1 else "one",
        evidence=run.evidence([view.rank for view in living[:4]]),
        steps=fix.steps,
        ranks=ranks_in_words(view.rank for view in living),
        rank=first.rank,
        where=run.where(first),
        advice=fix.text,
    )


def hang_at_exit(run: IncidentView) -> Iterator[Finding]:
    """The training is over, and a rank does not end: it has destroyed its process groups, or its script has ended."""
    for view in run.past_the_end:
        if view.activity or view.sample is None:
            continue
        fix = remediation(view)
        over = view.sample.leaving or activity_of(view).kind is Activity.SCRIPT_ENDED
        yield book.finding(
            "hang-at-exit",
            # a script that goes on after its group may upload, merge or serve what it has trained: no rank waits for that
            run.severity_of(view) if over or activity_of(view).waits_for_thread else Severity.WARNING,
            case="leaving" if view.sample.leaving else "" if over else "left-group",
            evidence=run.evidence([view.rank]),
            steps=fix.steps,
            who=run.rank_label(view.rank),
            where=run.where(view),
            advice=fix.text,
        )


def _while_others(run: IncidentView, view: RankView, waiting: tuple[int, ...]) -> str:
    """What the others do meanwhile, as the end of a sentence."""
    if waits := run.waits_words([view.rank]):
        return waits
    return f"{ranks_in_words(waiting)} {'is' if len(waiting) == 1 else 'are'} ahead"


def _in_different(run: IncidentView) -> Finding:
    """All wait, each for ranks that wait elsewhere."""
    calls: dict[tuple[str, str, int], list[int]] = {}
    for rank in run.waiting_ranks:
        calls.setdefault(run.waiting.call_of(run.views[rank]), []).append(rank)
    fewest_first = sorted(calls.items(), key=lambda item: (len(item[1]), item[1]))
    few = fewest_first[0][1]
    return book.finding(
        "hang-other-operation",
        ERROR,
        case="each-in-another",
        evidence=(*_fewer(run, few[0]), *_places(run, run.waiting_ranks), *run.evidence(few[:2])),
        calls="; ".join(
            f"{ranks_in_words(ranks)} in {name}{f' (number {number} of group {group})' if group else ''}"
            for (name, group, number), ranks in fewest_first
        ),
        rank=few[0],
        where=run.where(run.views[few[0]]),
        gathering=_gathering(run, run.waiting_ranks),
    )


def _fewer(run: IncidentView, rank: int) -> Iterator[str]:
    """Where a rank has called fewer collectives of a group than others that wait in it: its line may only follow."""
    for behind in run.waiting.lagging():
        if rank in behind.ranks and set(behind.waiting) & set(run.waiting_ranks):
            yield (
                f"rank {rank} has called {behind.sequence} collectives of group {behind.group}, {ranks_in_words(behind.waiting)} "
                f"{behind.ahead}: {book.phrase('hang', 'fewer-calls')}"
            )


def _other_root(run: IncidentView, roots: dict[str, tuple[int, ...]]) -> Finding:
    """All are in one collective, and do not agree on who sends or receives."""
    fewest_first = sorted(roots.items(), key=lambda item: (len(item[1]), item[1]))
    few = fewest_first[0][1]
    return book.finding(
        "hang-other-operation",
        ERROR,
        case="other-root",
        evidence=(*_places(run, run.waiting_ranks), *run.evidence(few[:2])),
        calls="; ".join(f"{ranks_in_words(ranks)}: {root}" for root, ranks in fewest_first),
        rank=few[0],
        where=run.where(run.views[few[0]]),
    )


def _calls(difference: Difference) -> str:
    """What the ranks of a group called, those with the same call together."""
    calls = []
    for operation, ranks in difference.calls:
        sizes = sizes_text(operation)
        sizes += f" {' '.join(dict.fromkeys(operation.types))}" if difference.same_sizes else ""
        called = f"{operation.name} of {sizes}" if sizes else operation.name
        calls.append(f"{ranks_in_words(ranks)}: {called}{at_place(operation)}")
    return "; ".join(calls)


def _now(run: IncidentView, difference: Difference) -> str:
    """Where the first of the fewest is now, as the end of a sentence; "" where it does not run any more."""
    rank = difference.calls[0][1][0]
    return "" if rank in run.faulty_ranks else f"; rank {rank} now {run.where(run.views[rank])}"


def _difference_evidence(run: IncidentView, difference: Difference) -> Iterator[str]:
    ranks = [rank for _, ranks in difference.calls for rank in ranks]
    yield from run.waiting.before(difference)
    yield from run.waiting.first_time(difference)
    yield from _ended(run, ranks)
    yield from _places(run, [rank for rank in ranks if rank not in run.faulty_ranks])
    yield from run.evidence(difference.calls[0][1][:2])


def _gathering(run: IncidentView, ranks: Iterable[int]) -> str:
    """What else ZeRO-3 asks of ranks that took different branches."""
    together = any(gathers(run.views[rank]) for rank in ranks if rank in run.views)
    return book.phrase("hang", "zero3-gathers") if together else ""


def _places(run: IncidentView, ranks: tuple[int, ...] | list[int]) -> tuple[str, ...]:
    """Where ranks stand now, equal places together."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in run.views:
            places.setdefault(run.where(run.views[rank]), []).append(rank)
    return tuple(f"{ranks_in_words(members)} now: {where}" for where, members in places.items())


def _ended(run: IncidentView, ranks: Iterable[int]) -> Iterator[str]:
    """How those of some ranks ended that have."""
    for rank in ranks:
        view = run.views[rank]
        if view.ended:
            after = f" after {view.sample.failure}" if view.sample and view.sample.failure else ""
            yield f"rank {rank} ended: {view.ended}{after}"


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
