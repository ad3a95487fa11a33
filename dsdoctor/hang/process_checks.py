"""A case -> findings about a rank's process: gone, stopped, without an interpreter, waiting for a lock that nobody has. Judges,
never looks."""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.case import CRASHES, EXIT_STATUS, QUIET, Case, is_terminated_on_request, severity_of, signal_of
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, Frame, RankView
from dsdoctor.hang.outside import NOT_INSTALLED, REFUSED
from dsdoctor.hang.stacks import acting_stack, frame_text, gathers, own_frame, ranks_words
from dsdoctor.hang.waiting import at_place
from dsdoctor.rules import book

ERROR = Severity.ERROR


def hang_rank_gone(case: Case) -> Iterator[Finding]:
    """The process of a rank has ended, and the other ranks wait for it."""
    first = case.incident.first_ended
    parted = {rank for each in case.waiting.differences() for _, ranks in each.calls for rank in ranks}
    for view in case.dead:
        follows = first or (not case.waiting_ranks and case.incident.source != PROCESSES)
        # a rank that came to its end after it had parted from the others is not at fault
        if (view.rank not in first and follows) or (view.ended == QUIET and view.rank in parted):
            continue
        sample = view.sample
        signal = signal_of(view)
        others = case.waits_words()
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
            evidence=(*_calls_of(case, view), *_met(case, view), *case.evidence([view.rank])),
            who=case.rank_label(view.rank),
            how=view.ended,
            failure=f" after {sample.failure}" if sample and sample.failure else "",
            others=others,
            rank=view.rank,
            example=next((f", such as {each}" for each in _last_calls(case, view)), ""),
            gathering=book.phrase("hang", "zero3-gathers")
            if any(gathers(other) for other in case.views.values())
            else "",
        )


def _met(case: Case, view: RankView) -> Iterator[str]:
    """What the others had called when a rank ended itself: it may have met another collective."""
    if view.ended.endswith("SIGABRT"):
        for rank in sorted(set(case.views) - {view.rank})[:4]:
            yield from (
                f"rank {rank} last called {call.removesuffix(f' on rank {rank}')}"
                for call in _last_call(case.views[rank])
            )


def _last_calls(case: Case, view: RankView) -> Iterator[str]:
    """The last collectives of the other ranks."""
    for rank in sorted(set(case.views) - {view.rank}):
        yield from _last_call(case.views[rank])


def _calls_of(case: Case, view: RankView) -> Iterator[str]:
    """How many collectives a rank that came to its regular end had called, where others have called more."""
    if view.ended != QUIET or view.sample is None:
        return
    for group in view.sample.groups:
        others = {
            each.sequence: rank
            for rank, other in case.views.items()
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


def hang_rank_stopped(case: Case) -> Iterator[Finding]:
    """The process of a rank is stopped: by a signal (Ctrl-Z, a scheduler that suspends) or by a debugger."""
    for view in case.stopped:
        yield book.finding(
            "hang-rank-stopped",
            ERROR,
            evidence=case.evidence([view.rank]),
            who=case.rank_label(view.rank),
            state=LETTERS[view.state],
            others=_others_wait(case),
            host=view.host,
            pid=view.pid,
        )


def hang_disk_sleep(case: Case) -> Iterator[Finding]:
    """The process of a rank waits in the kernel for a disk, a network file system or a driver, and cannot be interrupted."""
    for view in case.sleeping:
        yield book.finding(
            "hang-disk-sleep",
            severity_of(view),
            evidence=case.evidence([view.rank]),
            who=case.rank_label(view.rank),
            state=LETTERS["D"],
            where=case.where(view),
            others=_others_wait(case),
            host=view.host,
            disk=view.disk,
            pid=view.pid,
        )


def hang_host_gone(case: Case) -> Iterator[Finding]:
    """A node is not reached any more, or the watch there has ended, and nothing moves."""
    for host, ranks in sorted(case.incident.silent_hosts.items()):
        if not set(ranks) <= set(case.views):
            yield book.finding(
                "hang-host-gone",
                ERROR,
                evidence=case.evidence(()),
                node=host,
                ranks=ranks_words(ranks),
                others=_others_wait(case),
                host=host.partition("/")[0],
            )
    for host, ranks in sorted(case.incident.left_hosts.items()):
        yield book.finding(
            "hang-host-gone",
            ERROR,
            case="one-rank-ended" if len(ranks) == 1 else "ranks-ended",
            evidence=case.evidence(()),
            node=host,
            ranks=ranks_words(ranks),
            others=_others_wait(case),
        )


def hang_network_cut(case: Case) -> Iterator[Finding]:
    """Two nodes of a run do not reach each other, and the ranks of both are there."""
    for host, ranks in sorted(case.incident.silent_hosts.items()):
        if set(ranks) <= set(case.views) and not any(rank in case.faulty_ranks for rank in ranks):
            yield book.finding(
                "hang-network-cut",
                ERROR,
                evidence=case.evidence(()),
                node=host,
                ranks=ranks_words(ranks),
                others=_others_wait(case),
                host=host.partition("/")[0],
            )
            return


def hang_interpreter_held(case: Case) -> Iterator[Finding]:
    """On a rank no Python code has run for a while: C code holds the interpreter's lock (the GIL)."""
    for view in case.gil_blocked:
        yield book.finding(
            "hang-interpreter-held",
            severity_of(view),
            evidence=case.evidence([view.rank]),
            who=case.rank_label(view.rank),
            seconds=f"{view.silent:.0f}",
            where=case.where(view),
            others=_others_wait(case),
            pid=view.pid,
        )


def hang_stale_lock(case: Case) -> Iterator[Finding]:
    """A rank waits for the lock of a torch extension that no living process holds."""
    locks = {
        view.lock.path: view
        for view in case.incident.ranks
        if view.lock and view.lock.holder.pid is None and not view.lock.holder.doubt
    }
    if any("/torch/utils/cpp_extension.py" in frame.file for frame in _innermost_library(case)):
        return
    for path, first in locks.items():
        ranks = [view.rank for view in case.incident.ranks if view.lock and view.lock.path == path]
        yield book.finding(
            "hang-stale-lock",
            ERROR,
            case="" if len(ranks) == 1 else "ranks",
            evidence=(f"the lock is {first.lock.age / 60:.0f} minutes old", *case.evidence([first.rank]))
            if first.lock
            else (),
            ranks=ranks_words(ranks),
            path=path,
            host=first.host,
        )


def hang_stacks_unread(case: Case) -> Iterator[Finding]:
    """The stacks of running processes could not be read, so what they wait for is not known."""
    reasons: dict[str, list[int]] = {}
    for view in case.unread:
        reasons.setdefault(view.unread, []).append(view.rank)
    for reason, ranks in reasons.items():
        waits = case.waits_words(ranks)
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
                *(_outside_of(case, rank) for rank in ranks[:4]),
                *([waits] if waits and reason == NOT_LOOKED else []),
            ),
            ranks=ranks_words(ranks),
            reason=reason,
            pid=case.views[ranks[0]].pid,
        )


def _outside_of(case: Case, rank: int) -> str:
    """What is seen of a process without its stacks."""
    view = case.views[rank]
    words = [
        LETTERS.get(view.state, view.state),
        *([f"in the kernel: {view.waits}"] if view.waits else []),
        view.activity,
        f"its last sample is {view.age:.0f} s old" if view.unread == NOT_LOOKED else "",
    ]
    return f"rank {rank} (pid {view.pid}): {', '.join(word for word in words if word)}"


def _innermost_library(case: Case) -> Iterator[Frame]:
    """The innermost frames of the ranks that wait for no lock: one of them, on any node, may be compiling."""
    for view in case.incident.ranks:
        if view.lock is None and view.rank not in case.faulty_ranks:
            yield from acting_stack(view)[-6:]


def _others_wait(case: Case) -> str:
    words = case.waits_words()
    return f"; {words}" if words else ""
