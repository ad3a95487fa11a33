"""A case -> findings about a rank's process: gone, stopped, without an interpreter, waiting for a lock that nobody has. Judges,
never looks."""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.case import QUIET, Case, is_asked, next_step, severity_of
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, Frame, RankView
from dsdoctor.hang.outside import NOT_INSTALLED, REFUSED
from dsdoctor.hang.stacks import GATHERED, acting_stack, gathers, own_frame, place, ranks_words
from dsdoctor.hang.waiting import at_place


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
        how = view.ended or "nobody could see how"
        why = f" after {sample.failure}" if sample and sample.failure else ""
        others = case.waits_words() or "what the other ranks report after that only follows"
        make = Finding.warning if is_asked(view) else Finding.error
        sentence, steps = (_quiet(case, view), ()) if view.ended == QUIET else next_step(view)
        yield make(
            "hang-rank-gone",
            f"{case.who(view.rank)} came to its end (exit status 0), and other ranks called a collective after that"
            if view.ended == QUIET and not case.waits_words()
            else f"{case.who(view.rank)} is gone ({how}){why}, and {others}",
            evidence=(*_calls_of(case, view), *_met(case, view), *case.evidence([view.rank])),
            fix=sentence,
            steps=steps,
        )


def _met(case: Case, view: RankView) -> Iterator[str]:
    """What the others had called when a rank ended itself: it may have met another collective."""
    if view.ended.endswith("SIGABRT"):
        for rank in sorted(set(case.views) - {view.rank})[:4]:
            yield from (
                f"rank {rank} called last {call.removesuffix(f' on rank {rank}')}"
                for call in _last_call(case.views[rank])
            )


def _quiet(case: Case, view: RankView) -> str:
    """What to do about a rank that came to its regular end."""
    more = [each for rank in sorted(case.views) if rank != view.rank for each in _last_call(case.views[rank])]
    told = f", such as {more[0]}" if more else ""
    return (
        f"either rank {view.rank} leaves earlier than the others (an early return, fewer batches, sys.exit), or they call "
        f"collectives that it does not{told}: compare the branches that lead there"
        f"{GATHERED if any(gathers(other) for other in case.views.values()) else ''}"
    )


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
        yield f"what stands at {place(own)} on rank {view.rank}"


def hang_rank_stopped(case: Case) -> Iterator[Finding]:
    """The process of a rank is stopped: by a signal (Ctrl-Z, a scheduler that suspends) or by a debugger."""
    for view in case.stopped:
        yield Finding.error(
            "hang-rank-stopped",
            f"{case.who(view.rank)} does not run: it is {LETTERS[view.state]}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix=f"on {view.host} let it continue, or find out who stopped it",
            steps=(step("kill -CONT {pid}", pid=view.pid),),
        )


def hang_disk_sleep(case: Case) -> Iterator[Finding]:
    """The process of a rank waits in the kernel for a disk, a network file system or a driver, and cannot be interrupted."""
    for view in case.sleeping:
        yield severity_of(view)(
            "hang-disk-sleep",
            f"{case.who(view.rank)} is {LETTERS['D']}: {case.where(view)}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix=f"on {view.host} see whether {view.disk or 'that device or file system'} answers",
            steps=(step("cat /proc/{pid}/wchan", pid=view.pid), step("dmesg -T | tail"), step("df -h")),
        )


def hang_host_gone(case: Case) -> Iterator[Finding]:
    """A node is not reached any more, or the watch there has ended, and nothing moves."""
    for host, ranks in sorted(case.incident.silent_hosts.items()):
        if not set(ranks) <= set(case.views):
            yield Finding.error(
                "hang-host-gone",
                f"{host} with {ranks_words(ranks)} is not reached any more{_others_wait(case)}",
                evidence=case.evidence(()),
                fix="see whether it is up, and look at its link and at the switch",
                steps=(step("ping -c 3 {host}", host=host.partition("/")[0]),),
            )
    for host, ranks in sorted(case.incident.left_hosts.items()):
        yield Finding.error(
            "hang-host-gone",
            f"{ranks_words(ranks)} on {host} {'has' if len(ranks) == 1 else 'have'} ended: the machine answers, and the watch "
            f"there is over{_others_wait(case)}",
            evidence=case.evidence(()),
            fix=f"read what the ranks on {host} printed last",
        )


def hang_network_cut(case: Case) -> Iterator[Finding]:
    """Two nodes of a run do not reach each other, and the ranks of both are there."""
    for host, ranks in sorted(case.incident.silent_hosts.items()):
        if set(ranks) <= set(case.views) and not any(rank in case.unwell for rank in ranks):
            yield Finding.error(
                "hang-network-cut",
                f"{host} with {ranks_words(ranks)} was not reached by the other nodes, and runs{_others_wait(case)}",
                evidence=case.evidence(()),
                fix="look at the link between the nodes, and test it",
                steps=(step("ping -c 3 {host}", host=host.partition("/")[0]), step("python -m dsdoctor comm")),
            )
            return


def hang_interpreter_held(case: Case) -> Iterator[Finding]:
    """On a rank no Python code has run for a while: C code holds the interpreter's lock (the GIL)."""
    for view in case.deaf:
        yield severity_of(view)(
            "hang-interpreter-held",
            f"{case.who(view.rank)} runs no Python any more since {view.silent:.0f} s, C code holds the GIL: "
            f"{case.where(view)}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix="the last line of its stack called into C code that neither returns nor lets go of the GIL",
            steps=(step("py-spy dump --native --pid {pid}", pid=view.pid),),
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
        yield Finding.error(
            "hang-stale-lock",
            f"{ranks_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {path}, which no "
            f"living process on {first.host} holds",
            evidence=(f"it is {first.lock.age / 60:.0f} minutes old", *case.evidence([first.rank]))
            if first.lock
            else (),
            fix=f"remove it on {first.host}: a launch that was killed while it compiled has left it",
            steps=(
                step("fuser -v {path}", path=path, note="shows nobody"),
                step("rm {path}", path=path),
            ),
        )


def hang_stacks_unread(case: Case) -> Iterator[Finding]:
    """The stacks of running processes could not be read, so what they wait for is not known."""
    reasons: dict[str, list[int]] = {}
    for view in case.unread:
        reasons.setdefault(view.unread, []).append(view.rank)
    for reason, ranks in reasons.items():
        sentence, steps = READING.get(reason, ("name the ranks, or their launcher", (step("pgrep -af python"),)))
        if reason == NOT_LOOKED:
            pid = case.views[ranks[0]].pid
            sentence, steps = "ask from outside where it stands", (step("py-spy dump --pid {pid}", pid=pid),)
        waits = case.waits_words(ranks)
        yield Finding.warning(
            "hang-stacks-unread",
            f"where {ranks_words(ranks)} {'stands' if len(ranks) == 1 else 'stand'} is not known: {reason}",
            evidence=(
                *(_outside_of(case, rank) for rank in ranks[:4]),
                *([waits] if waits and reason == NOT_LOOKED else []),
            ),
            fix=sentence,
            steps=steps,
        )


READING = {
    NOT_INSTALLED: ("install it", (step('python -m pip install "dsdoctor[hang]"'),)),
    REFUSED: (
        "ask as root, or let a debugger read the process",
        (step("sudo sysctl kernel.yama.ptrace_scope=0"), instead("docker run --cap-add SYS_PTRACE IMAGE")),
    ),
}
"""What to do where stacks cannot be read, by the reason."""


def _outside_of(case: Case, rank: int) -> str:
    """What is seen of a process without its stacks."""
    view = case.views[rank]
    words = [
        LETTERS.get(view.state, view.state),
        *([f"in the kernel: {view.waits}"] if view.waits else []),
        view.activity,
        f"its newest sample is {view.age:.0f} s old" if view.unread == NOT_LOOKED else "",
    ]
    return f"rank {rank} (pid {view.pid}): {', '.join(word for word in words if word)}"


def _innermost_library(case: Case) -> Iterator[Frame]:
    """The innermost frames of the ranks that wait for no lock: one of them, on any node, may be compiling."""
    for view in case.incident.ranks:
        if view.lock is None and view.rank not in case.unwell:
            yield from acting_stack(view)[-6:]


def _others_wait(case: Case) -> str:
    words = case.waits_words()
    return f", and {words}" if words else ""
