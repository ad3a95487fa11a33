"""A case -> findings: who does not come and why. Each check is one cause; the first that explains the hang is told. Judges,
never looks.

When one rank fails all others fail to move, so the causes stand in the order in which they explain each other.
"""

from collections.abc import Callable, Iterator

from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import step
from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.case import Case
from dsdoctor.hang.models import Frame, Operation, RankView
from dsdoctor.hang.stacks import acting_stack, collective_in, doing, ranks_words
from dsdoctor.hang.waiting import Difference


def hang_rank_gone(case: Case) -> Iterator[Finding]:
    """The process of a rank has ended, and the other ranks wait for it.

    It was killed, it ended with an exception, or the script came to its end on that rank alone: an early return, a shorter
    loop, sys.exit() on one branch.

    Why it matters: a collective needs every rank of its group, so the others wait until torch's timeout ends them, and
    that names a collective and not the rank that is missing.

    How to fix it: read what that rank printed last. After SIGKILL ask the kernel whether memory ran out; after exit status
    0 look for a branch on which that rank leaves the loop earlier than the others.

        $ dmesg -T | grep -iE 'killed process|oom' | tail

    Since: 0.1
    """
    first = case.incident.first_ended
    for view in case.dead:
        if view.rank not in first and (first or not case.waiting_ranks):
            continue
        sample = view.sample
        how = view.ended or "nobody could see how"
        why = f" after {sample.failure}" if sample and sample.failure else ""
        quiet = how == "exit status 0"
        others = case.waits_words() or "what the other ranks report after that only follows"
        yield Finding.error(
            "hang-rank-gone",
            f"{case.who(view.rank)} is gone ({how}){why}, and {others}",
            evidence=case.evidence([view.rank]),
            fix="look for the branch on which this rank leaves earlier than the others"
            if quiet
            else "read what that rank printed last, and ask the kernel",
            steps=() if quiet else (step("dmesg -T | grep -iE 'killed process|oom' | tail"),),
        )


def hang_rank_stopped(case: Case) -> Iterator[Finding]:
    """The process of a rank is stopped: by a signal (Ctrl-Z, a scheduler that suspends) or by a debugger.

    Why it matters: all other ranks wait for it, and it will not move by itself.

    How to fix it: let it continue, or find out who stopped it.

        $ kill -CONT PID

    Since: 0.1
    """
    for view in case.stopped:
        yield Finding.error(
            "hang-rank-stopped",
            f"{case.who(view.rank)} does not run: it is {LETTERS[view.state]}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix=f"on {view.host} let it continue, or find out who stopped it",
            steps=(step("kill -CONT {pid}", pid=view.pid),),
        )


def hang_disk_sleep(case: Case) -> Iterator[Finding]:
    """The process of a rank waits in the kernel for a disk, a network file system or a driver, and cannot be interrupted.

    Why it matters: such a wait ends only when the device answers; the other ranks wait as long, and kill -9 does not help.

    How to fix it: see what it waits for. A network file system whose server is away, a full or failing disk and a GPU's driver
    are the usual ones.

        $ cat /proc/PID/wchan
        $ dmesg -T | tail
        $ df -h

    Since: 0.1
    """
    for view in case.sleeping:
        yield _severity(view)(
            "hang-disk-sleep",
            f"{case.who(view.rank)} is {LETTERS['D']}: {case.where(view)}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix=f"on {view.host} see which device or file system does not answer",
            steps=(step("cat /proc/{pid}/wchan", pid=view.pid), step("dmesg -T | tail"), step("df -h")),
        )


def hang_host_gone(case: Case) -> Iterator[Finding]:
    """A node does not answer any more: its supervisor is not heard of, and nothing moves.

    Why it matters: its ranks are lost to the job, and all others wait for them.

    How to fix it: see whether it is up, and look at its link and at the switch.

        $ ping -c 3 HOST

    Since: 0.1
    """
    for host, ranks in sorted(case.incident.silent_hosts.items()):
        yield Finding.error(
            "hang-host-gone",
            f"{host} with {ranks_words(ranks)} does not answer any more{_others_wait(case)}",
            evidence=case.evidence(()),
            fix="see whether it is up, and look at its link and at the switch",
            steps=(step("ping -c 3 {host}", host=host.partition("/")[0]),),
        )


def hang_interpreter_held(case: Case) -> Iterator[Finding]:
    """On a rank no Python code has run for a while: C code holds the interpreter's lock (the GIL).

    A C extension waits, or computes, without releasing the lock; a deadlock between that lock and one of its own is usual.

    Why it matters: no other thread of that process can run, watchdogs written in Python included. All other ranks wait for it.

    How to fix it: the stack in the finding, where Python's fault handler could write it, names the call. Else ask from outside.

        $ py-spy dump --native --pid PID

    Since: 0.1
    """
    for view in case.deaf:
        yield _severity(view)(
            "hang-interpreter-held",
            f"{case.who(view.rank)} runs no Python any more since {view.silent:.0f} s, C code holds the GIL: "
            f"{case.where(view)}{_others_wait(case)}",
            evidence=case.evidence([view.rank]),
            fix="the last line of its stack called into C code that neither returns nor lets go of the GIL",
            steps=(step("py-spy dump --native --pid {pid}", pid=view.pid),),
        )


def hang_stale_lock(case: Case) -> Iterator[Finding]:
    """A rank waits for the lock of a torch extension that no living process holds.

    torch makes a file named lock while it compiles an extension. A launch that was killed meanwhile leaves it behind.

    Why it matters: torch waits for ever, in this start and in every later one, and says nothing.

    How to fix it: remove the file. Nothing compiles there now.

        $ fuser -v ~/.cache/torch_extensions/py311_cu130/fused_adam/lock
        $ rm ~/.cache/torch_extensions/py311_cu130/fused_adam/lock

    Since: 0.1
    """
    locks = {
        view.lock.path: view
        for view in case.incident.ranks
        if view.lock and view.lock.holder is None and view.lock.seen
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


def hang_not_started(case: Case) -> Iterator[Finding]:
    """Some ranks wait for others at the start, and those have not called init_process_group, or were never seen.

    Why it matters: the start needs every rank; it ends by a timeout that names an address.

    How to fix it: look at what the missing ranks do, and whether the launcher started them all with the same address.

        $ python -m dsdoctor comm

    Since: 0.1
    """
    waiting = [view.rank for view in case.starting]
    living = [view for view in case.incident.ranks if view.rank not in case.unwell]
    late = [view for view in living if view.rank not in waiting and not (view.sample and view.sample.joined)]
    if not waiting or not (late or case.unknown):
        return
    for view in late:
        yield _severity(view)(
            "hang-not-started",
            f"{case.who(view.rank)} has not joined: {case.where(view)}, while {ranks_words(waiting)} "
            f"{'waits' if len(waiting) == 1 else 'wait'} at the start",
            evidence=case.evidence([view.rank]),
            fix="that line keeps it from the start",
        )
    if case.unknown:
        yield Finding.error(
            "hang-not-started",
            f"{ranks_words(case.unknown)} of {case.incident.world} {'was' if len(case.unknown) == 1 else 'were'} never "
            f"seen, while {ranks_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'} at the start",
            evidence=case.evidence(waiting[:1]),
            fix="see whether the launcher started them, on all hosts, with the same address and port",
            steps=(step("python -m dsdoctor comm"),),
        )


def hang_other_operation(case: Case) -> Iterator[Finding]:
    """The ranks of a group called different collectives at the same place in their order.

    One rank took another branch: it saved alone (save_checkpoint must be called on every rank), skipped a step or a batch,
    caught an exception and went on, used other parameters or another expert.

    Why it matters: from there on every collective meets the wrong partner. On some backends that hangs, on others it
    silently mixes up data or crashes later.

    How to fix it: compare the lines in the finding: the first difference is where the ranks parted.

        $ python -m dsdoctor hang DIR

    Since: 0.1
    """
    differences = [each for each in case.waiting.differences() if not each.same_name]
    for difference in differences:
        yield _different(case, difference, "hang-other-operation", "called different collectives")
    living = [rank for rank in case.views if rank not in case.unwell]
    calls = {case.waiting.call_of(case.views[rank]) for rank in case.waiting_ranks}
    if not differences and not case.starting and len(case.waiting_ranks) == len(living) and len(calls) > 1:
        yield _in_different(case)


def hang_other_sizes(case: Case) -> Iterator[Finding]:
    """The ranks of a group called the same collective with tensors of other sizes.

    An uneven last batch, another sequence length, a parameter that is used on some ranks only, or a list whose length
    differs.

    Why it matters: NCCL waits or mixes up data without a word; gloo crashes in pair.cc, or waits.

    How to fix it: make the sizes equal before the call: drop_last=True, padding to the longest of all ranks, or
    gathering sizes first.

        $ python -m dsdoctor hang DIR

    Since: 0.1
    """
    for difference in case.waiting.differences():
        if difference.same_name:
            yield _different(case, difference, "hang-other-sizes", "called the same collective with other sizes")


def hang_rank_behind(case: Case) -> Iterator[Finding]:
    """A rank has called fewer collectives than the others, which wait for it.

    Why it matters: all ranks wait for that one, and torch's timeout names only the collective.

    How to fix it: the line in the finding is where that rank stands, and what it does there.

        $ python -m dsdoctor hang DIR

    Since: 0.1
    """
    told: set[int] = set(case.unwell)
    for behind in case.waiting.behind():
        for rank in sorted(set(behind.ranks) - told):
            told.add(rank)
            view = case.views[rank]
            numbers = f"collective {behind.sequence} of {behind.ahead} in group {behind.group}"
            yield _still_or_works(case, view, numbers, behind.waiting)


def hang_rank_outside(case: Case) -> Iterator[Finding]:
    """All ranks have called as many collectives, some wait in one, and others stand elsewhere.

    Why it matters: those that wait cannot go on before the others have called it too.

    How to fix it: the line in the finding is where the rank stands, and what it does there.

        $ python -m dsdoctor hang DIR

    Since: 0.1
    """
    waiting = case.waiting_ranks
    if not waiting:
        return
    for view in case.incident.ranks:
        gone = view.rank in case.unwell or view.rank in waiting
        if not gone and not (view.sample and view.sample.leaving):
            yield _still_or_works(case, view, "it stands in no collective", waiting)


def hang_transport(case: Case) -> Iterator[Finding]:
    """All ranks have come to the same collective, with the same sizes, and it does not end.

    Why it matters: no rank's own code is at fault: the network between them, or the library's choice of it, does not carry
    the data.

    How to fix it: test the links between the ranks, and let NCCL tell what it uses.

        $ python -m dsdoctor comm
        $ export NCCL_DEBUG=INFO

    Since: 0.1
    """
    waiting = case.waiting_ranks
    everybody = len(case.views) == case.incident.world and len(waiting) == len(case.views)
    names = {case.waiting.operation_of(case.views[rank]) for rank in waiting}
    if not everybody or len(waiting) < 2 or len(names) > 1:
        return
    yield _severity(*case.views.values())(
        "hang-transport",
        f"all {len(waiting)} ranks have come to {names.pop()}, and it does not end",
        evidence=case.evidence(waiting[:1]),
        fix="test the links between the ranks",
        steps=(step("python -m dsdoctor comm"), step("export NCCL_DEBUG=INFO")),
    )


def hang_all_outside(case: Case) -> Iterator[Finding]:
    """No rank stands in a collective, and none moves.

    Why it matters: each waits for something else than the other ranks: data, a file system, a lock, another service.

    How to fix it: the lines in the finding are where they stand.

        $ python -m dsdoctor hang DIR

    Since: 0.1
    """
    living = [view for view in case.incident.ranks if view.rank not in case.unwell]
    if case.waiting_ranks or not living or not case.joined:
        return
    first = living[0]
    yield _severity(*living)(
        "hang-all-outside",
        f"{ranks_words(view.rank for view in living)} {'does' if len(living) == 1 else 'do'} not move, and wait for no "
        f"other rank; rank {first.rank}: {case.where(first)}",
        evidence=case.evidence([view.rank for view in living[:4]]),
        fix="look at what that line waits for",
    )


def _severity(*views: RankView) -> Callable[..., Finding]:
    """An error of ranks that are still, a warning where one of them is seen to work: slow is not hung."""
    return Finding.warning if any(view.activity for view in views) else Finding.error


def _still_or_works(case: Case, view: RankView, numbers: str, waiting: tuple[int, ...]) -> Finding:
    """Of a rank that others wait for: what it does; a warning where it is seen to work."""
    make, verb = (Finding.warning, "works on") if view.activity else (Finding.error, "does not come")
    others = (
        f"while {case.waits_words([view.rank])}"
        if case.waits_words([view.rank])
        else (f"and {ranks_words(waiting)} {'is' if len(waiting) == 1 else 'are'} ahead")
    )
    return make(
        "hang-rank-outside" if numbers == "it stands in no collective" else "hang-rank-behind",
        f"{case.who(view.rank)} {verb}: {case.where(view)}, {others}",
        evidence=(f"rank {view.rank}: {numbers}", *case.evidence([view.rank])),
        fix="that line is where it stands" if not view.activity else "wait for it, or make that part shorter",
    )


def _in_different(case: Case) -> Finding:
    """All wait, each for ranks that wait elsewhere."""
    calls: dict[tuple[str, str, int], list[int]] = {}
    for rank in case.waiting_ranks:
        calls.setdefault(case.waiting.call_of(case.views[rank]), []).append(rank)
    fewest_first = sorted(calls.items(), key=lambda item: (len(item[1]), item[1]))
    told = "; ".join(
        f"{ranks_words(ranks)} in {name}{f' (number {number} of group {group})' if group else ''}"
        for (name, group, number), ranks in fewest_first
    )
    few = fewest_first[0][1]
    return Finding.error(
        "hang-other-operation",
        f"the ranks wait for each other in different collectives: {told}; rank {few[0]} {case.where(case.views[few[0]])}",
        evidence=(*_places(case, case.waiting_ranks), *case.evidence(few[:2])),
        fix="compare the lines: one rank took another branch",
    )


def _different(case: Case, difference: Difference, rule: str, what: str) -> Finding:
    told = "; ".join(f"{ranks_words(ranks)}: {_call(operation)}" for operation, ranks in difference.calls)
    few = difference.calls[0][1]
    ranks = [rank for _, ranks in difference.calls for rank in ranks]
    return Finding.error(
        rule,
        f"the ranks of group {difference.group} {what} as number {difference.sequence}: {told}; rank {few[0]} now "
        f"{case.where(case.views[few[0]])}",
        evidence=(*_places(case, ranks), *case.evidence(few[:2])),
        fix="compare the lines: one rank took another branch"
        if rule == "hang-other-operation"
        else "make the sizes equal",
    )


def _innermost_library(case: Case) -> Iterator[Frame]:
    """The innermost frames of the ranks that wait for no lock: one of them, on any node, may be compiling."""
    for view in case.incident.ranks:
        if view.lock is None and view.rank not in case.unwell:
            yield from acting_stack(view)[-6:]


def _places(case: Case, ranks: tuple[int, ...] | list[int]) -> tuple[str, ...]:
    """Where ranks stand now, equal places together."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in case.views:
            places.setdefault(case.where(case.views[rank]), []).append(rank)
    return tuple(f"{ranks_words(members)} now: {where}" for where, members in places.items())


def _call(operation: Operation) -> str:
    sizes = " ".join("x".join(map(str, each)) or "1" for each in operation.sizes)
    return f"{operation.name} of {sizes}" if sizes else operation.name


def _others_wait(case: Case) -> str:
    words = case.waits_words()
    return f", and {words}" if words else ""


def explained(view: RankView) -> str:
    """What a rank does, for the lines of a timeline."""
    frames = acting_stack(view)
    return collective_in(frames) or doing(frames, view.waits)


CHECKS = (
    hang_rank_gone,
    hang_rank_stopped,
    hang_host_gone,
    hang_disk_sleep,
    hang_interpreter_held,
    hang_stale_lock,
    hang_not_started,
    hang_other_operation,
    hang_other_sizes,
    hang_rank_behind,
    hang_rank_outside,
    hang_transport,
    hang_all_outside,
)
