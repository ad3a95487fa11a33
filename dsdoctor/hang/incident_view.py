"""An incident with what follows from it alone: who waits where, who has ended, who only followed. Shared by all that judge."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from dsdoctor.core.finding import Severity
from dsdoctor.core.processes import LETTERS, FileHolder
from dsdoctor.hang.activity import Activity, activity_of, can_end
from dsdoctor.hang.models import MAX_SAMPLE_AGE, MOVED, NOT_LOOKED, PROCESSES, RECORDERS, Incident, RankView, Sample
from dsdoctor.hang.stacks import (
    OLD_STACK,
    acting_stack,
    collective_in,
    frame_text,
    is_own,
    is_starting,
    own_frame,
)
from dsdoctor.hang.waiting import Waiting
from dsdoctor.ranks.failure import is_peer_disconnect
from dsdoctor.ranks.nodelist import ranks_in_words

KILLED, ASKED_TO_END = "killed by ", ("SIGTERM", "SIGINT", "SIGHUP")
"""Launchers and people end ranks by these signals."""
EXIT_STATUS = "exit status "
QUIET = f"{EXIT_STATUS}0"
CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"}
MAX_THREADS = 4
DEAD = {"", "Z", "X"}
FURTHER_GROUP = {"new_group", "_new_group_with_tag"}
STOPPED = {"T", "t"}
MAIN_THREAD = "MainThread"
MIN_WAKES = 3
"""While nothing moved: a thread that came back to the user's own code so often goes round a loop there."""


LATE_FACTOR = 5.0
"""A wait that may end by itself is a hang after so many times the limit."""
MAX_TIMEOUT_SHARE = 0.6
"""Of torch's own timeout: an answer that comes after it helps nobody."""
NCCL_TIMEOUT_SECONDS = 600.0
"""Seconds of torch's timeout for NCCL where nothing is recorded."""


def hung_after(limit: float, timeout: float | None) -> float:
    """Seconds after which a wait that may end by itself is a hang. ``limit``: those after which it is late.

    >>> hung_after(8.0, 1800.0), hung_after(8.0, 20.0), hung_after(60.0, None)
    (40.0, 12.0, 300.0)
    """
    return max(limit, min(LATE_FACTOR * limit, MAX_TIMEOUT_SHARE * (timeout or NCCL_TIMEOUT_SECONDS)))


def first_to_exit(ranks: Sequence[RankView]) -> tuple[int, ...]:
    """The ranks of a node that ended first and drew the others along; none where that is not known, or is no news.

    A rank follows that says itself that another one is gone, or that was ended by a signal as launchers send it after another had
    ended. One killed by another signal is told at once. Of any other that is first only where a rank that follows says so:
    all may end alike.
    """
    ended = [view for view in ranks if view.ended]
    first = [view for view in ended if not follows(view, ended)]
    if first and all(is_killed(view) for view in first):
        return tuple(view.rank for view in first)
    if len(first) != 1 or not any(_says_so(view) for view in ended):
        return ()
    # a rank's own exception stands in its traceback; another rank may still say it
    if _failure(first[0]) and (len(ended) < len(ranks) or any(view.sample and view.sample.told for view in ended)):
        return ()
    return (first[0].rank,)


def follows(view: RankView, ended: Sequence[RankView]) -> bool:
    """Whether a rank ended because another one had."""
    asked = view.ended.startswith(KILLED) and view.ended.endswith(("SIGTERM", "SIGHUP"))
    by_itself = [each for each in ended if each is not view and not is_killed(each)]
    ended_by_launcher = asked or (view.ended.endswith("SIGKILL") and bool(by_itself))
    others = ended if asked else by_itself
    return _says_so(view) or (ended_by_launcher and any(each.ended_at < view.ended_at for each in others))


def is_killed(view: RankView) -> bool:
    """Whether a signal ended a rank that nobody sends to ask for its end."""
    return view.ended.startswith(KILLED) and not view.ended.endswith(ASKED_TO_END)


def is_terminated_on_request(view: RankView) -> bool:
    """Whether a rank was asked to end by a signal."""
    return view.ended.startswith(KILLED) and view.ended.endswith(ASKED_TO_END)


def signal_of(view: RankView) -> str:
    """The signal that ended a rank; "" for none."""
    return view.ended.removeprefix(KILLED) if view.ended.startswith(KILLED) else ""


def last_seen(view: RankView) -> str:
    """Where a rank that has ended was, as a sentence; "" at its regular end, and where no line of the user's was seen."""
    sample = view.sample
    if sample is None:
        return ""
    if own := own_frame(sample.failed_in):
        return f"rank {view.rank} raised it at {frame_text(own)}"
    if sample.leaving:
        return ""
    own = own_frame(next((thread.frames for thread in sample.threads if thread.main), ()), only=True)
    age = max(0.0, view.ended_at - sample.time) if view.ended_at else 0.0
    before = f", {age:.1f} s before its end," if view.ended_at else ""
    return f"rank {view.rank} was last seen{before} at {frame_text(own)}" if own else ""


def _failure(view: RankView) -> str:
    return view.sample.failure if view.sample else ""


def _says_so(view: RankView) -> bool:
    return is_peer_disconnect(_failure(view))


def without_old(view: RankView) -> RankView:
    """A rank without its sample where that tells only where it was: it may have gone on since, and accuses nobody."""
    return replace(view, sample=None) if view.unread == NOT_LOOKED else view


class IncidentView:
    """An incident as the judges see it."""

    def __init__(self, incident: Incident) -> None:
        incident = replace(incident, ranks=tuple(map(without_old, incident.ranks)))
        self.incident = incident
        self.views = {view.rank: view for view in incident.ranks}
        self.waiting = Waiting(incident.ranks)

    @cached_property
    def dead(self) -> tuple[RankView, ...]:
        """Ranks whose process has ended."""
        return tuple(view for view in self.incident.ranks if view.state in DEAD)

    @cached_property
    def stopped(self) -> tuple[RankView, ...]:
        """Ranks whose process a signal or a debugger has stopped."""
        return tuple(view for view in self.incident.ranks if view.state in STOPPED)

    @cached_property
    def sleeping(self) -> tuple[RankView, ...]:
        """Ranks that wait for a device in the kernel, and write no sample meanwhile."""
        return tuple(view for view in self.incident.ranks if view.state == "D")

    @cached_property
    def gil_blocked(self) -> tuple[RankView, ...]:
        """Ranks that run and have written no sample for a while, because C code holds the interpreter's lock."""
        ill = {view.rank for view in (*self.dead, *self.stopped, *self.sleeping)}
        return tuple(
            view
            for view in self.incident.ranks
            if view.rank not in ill
            and view.silent >= MAX_SAMPLE_AGE
            and not view.unread
            and not (view.sample and view.sample.leaving)
        )

    @cached_property
    def faulty_ranks(self) -> frozenset[int]:
        """All ranks whose process itself is the matter."""
        return frozenset(view.rank for view in (*self.dead, *self.stopped, *self.sleeping, *self.gil_blocked))

    @cached_property
    def starting(self) -> tuple[RankView, ...]:
        """Ranks that stand in the making of a process group, and not of a further one: that is a collective like others."""
        return tuple(
            view
            for view in self.incident.ranks
            if view.state not in DEAD
            and is_starting(acting_stack(view))
            and not (view.sample and view.sample.joined and collective_in(acting_stack(view)) in FURTHER_GROUP)
        )

    @cached_property
    def waiting_ranks(self) -> tuple[int, ...]:
        """Living ranks that stand in a collective."""
        return tuple(rank for rank in self.waiting.in_collective() if rank not in self.faulty_ranks)

    @cached_property
    def unknown(self) -> tuple[int, ...]:
        """Ranks of the world that nothing is known of."""
        # of running processes only those are looked at that were named
        if self.incident.source == PROCESSES:
            return ()
        hosts = (*self.incident.silent_hosts.values(), *self.incident.left_hosts.values())
        lost = {rank for ranks in hosts for rank in ranks}
        return tuple(rank for rank in range(self.incident.world) if rank not in self.views and rank not in lost)

    @cached_property
    def is_long_step(self) -> bool:
        """Whether no rank waits for another one, and one of them is seen to work: a long step, not a hang."""
        living = [view for view in self.incident.ranks if view.rank not in self.faulty_ranks]
        return not self.waiting_ranks and not self.starting and any(view.activity for view in living)

    @cached_property
    def unread(self) -> tuple[RankView, ...]:
        """Living ranks whose stacks could not be read: where they stand is not known."""
        return tuple(view for view in self.incident.ranks if view.unread and view.rank not in self.faulty_ranks)

    @cached_property
    def undecided(self) -> tuple[RankView, ...]:
        """Ranks seen from outside that wait for a thread in a line of the user's own that could not be read, as root reads none of
        another user: it may be the wait for a collective that was begun before."""
        if self.incident.source != PROCESSES:
            return ()
        return tuple(
            view for view in self.incident.ranks if view.rank not in self.faulty_ranks and _may_be_earlier(view)
        )

    @cached_property
    def moves(self) -> bool:
        """Whether two looks at running processes saw that the run goes on: a rank made progress, all work, or one works and none
        waits for it in a collective."""
        living = [view for view in self.incident.ranks if view.rank not in self.faulty_ranks]
        at_all = self.incident.source == PROCESSES and bool(living) and len(living) == len(self.incident.ranks)
        moved = any(MOVED in view.activity for view in living) or all(view.activity for view in living)
        return at_all and (moved or self.is_long_step)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all ranks of the run were seen, with their stacks."""
        return len(self.views) >= self.incident.world and not self.unread

    @cached_property
    def joined(self) -> bool:
        """Whether the ranks have become one run: what never called init_process_group waits for nobody."""
        return bool(self.starting) or any(view.sample and view.sample.joined for view in self.incident.ranks)

    @cached_property
    def past_the_end(self) -> tuple[RankView, ...]:
        """Living ranks that have destroyed their process groups, or whose script has ended; none while another living one has
        not, or where no rank ever had a group."""
        living = [view for view in self.incident.ranks if view.rank not in self.faulty_ranks]
        # one that makes its group anew is at a start again
        past = [view for view in living if is_past_the_end(view) and not is_starting(acting_stack(view))]
        grouped = any(view.sample and (view.sample.joined or view.sample.parted) for view in self.incident.ranks)
        return tuple(past) if grouped and len(past) == len(living) and not self.waiting_ranks else ()

    @cached_property
    def hung_after(self) -> float:
        """Seconds without progress after which a wait that may end by itself is a hang; 0 for a run that somebody says hangs."""
        return hung_after(self.incident.after, self.waiting.timeout())

    @property
    def is_late(self) -> bool:
        """Whether the limit is over, and a wait that may end by itself is no hang yet."""
        return self.incident.after <= self.incident.still < self.hung_after

    def severity_of(self, *views: RankView) -> Severity:
        """An error of ranks that cannot come, or have been still for many times the limit; a warning before. And where one of
        them is seen to work, slow is not hung, or polls a child process, which may work unseen: on a GPU, on another host."""
        if any(view.activity or polls_child(view) for view in views):
            return Severity.WARNING
        over = self.incident.still >= self.hung_after or not all(map(can_end, views))
        return Severity.ERROR if over else Severity.WARNING

    def lateness(self) -> tuple[str, ...]:
        """When a late rank counts as hung."""
        return (f"the wait may still end; it counts as a hang after {self.hung_after:.0f} s",) if self.is_late else ()

    def rank_label(self, rank: int) -> str:
        """A rank with host and process."""
        view = self.views.get(rank)
        return f"rank {rank} ({view.host}, pid {view.pid})" if view else f"rank {rank}"

    def where(self, view: RankView) -> str:
        """What a rank does and at which line, as the middle of a sentence."""
        frames = acting_stack(view)
        frame = own_frame(frames)
        name = self.waiting.operation_of(view) if view.rank in self.waiting_ranks else None
        words = f"blocked in {name}" if name else activity_of(view).words
        if frame is None:
            return words or "location unknown"
        error = view.sample.handling.partition(":")[0] if view.sample else ""
        seen = f" (seen {view.age:.0f} s ago)" if view.age >= OLD_STACK else ""
        return (
            f"{f'{words} ' if words else ''}at {frame_text(frame)}{f', while handling {error}' if error else ''}{seen}"
        )

    def waits_words(self, besides: Iterable[int] = ()) -> str:
        """Who waits in which collective, as the end of a sentence; "" where nobody does."""
        hidden = set(besides)
        by_name: dict[str, list[int]] = {}
        for rank in self.waiting_ranks:
            if rank not in hidden:
                by_name.setdefault(self.waiting.operation_of(self.views[rank]) or "", []).append(rank)
        parts = [
            f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} blocked in {name}"
            for name, ranks in by_name.items()
        ]
        return " and ".join(parts)

    def evidence(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """What was seen of some ranks, and how long nothing has moved."""
        lines = [line for rank in ranks if rank in self.views for line in self._seen_of(self.views[rank])]
        others = self.waits_words(ranks)
        lines += [others] if others else []
        return (*lines, *self._since())

    def _since(self) -> tuple[str, ...]:
        # a rank that ended within a second of its last calls was not seen to make them
        if self.incident.source == RECORDERS or self.incident.first_ended:
            return ()
        if self.incident.source == PROCESSES:
            return (f"two samples, {self.incident.still:.0f} s apart, are the same",)
        still = f"no rank has called a collective or completed a step for {self.incident.still:.0f} s"
        timeout = self.waiting.timeout()
        over = not timeout or self.past_the_end
        ends = "" if over else f"; torch's timeout ends it after {timeout:.0f} s, without naming a rank"
        return (f"{still}{ends}",)

    def _seen_of(self, view: RankView) -> Iterable[str]:
        step = view.sample.step if view.sample else None
        parts = [f"step {step}"] if step is not None else []
        parts += [f"in the kernel: {view.waits}"] if view.waits else []
        parts += [f"in {view.call[0]} of {view.call[1]}"] if len(view.call) > 1 and view.call[1] else []
        parts += [f"on {view.disk}"] if view.disk else []
        parts += [LETTERS[view.state]] if view.state in STOPPED | {"D"} else []
        parts += [view.activity] if view.activity else []
        if parts:
            yield f"rank {view.rank}: {', '.join(parts)}"
        if view.sample and (name := name_of_training_thread(view.sample)) != MAIN_THREAD:
            yield f"rank {view.rank} calls its collectives in its thread {name}"
        if view.sample and view.sample.handling:
            yield f"rank {view.rank} is handling {view.sample.handling}"
        if view.lock is not None:
            yield f"rank {view.rank} waits for {view.lock.path} to be removed: {_holder_words(view)}"
        if polls_child(view):
            yield f"rank {view.rank} polls a child process that is still running, in the loop {view.polls}"
        yield from (f"rank {view.rank}: {worker.line}" for worker in view.workers)
        yield from _threads_of(view)
        if view.state in DEAD:
            yield from filter(None, [last_seen(view)])
        elif chain := [frame_text(frame) for frame in acting_stack(view)[-3:]]:
            old = view.age >= OLD_STACK
            yield f"rank {view.rank} {f'was {view.age:.0f} s ago' if old else 'is'} in {' > '.join(chain)}"


def is_past_the_end(view: RankView) -> bool:
    """Whether a rank has destroyed its process groups, or its script has ended."""
    sample = view.sample
    return sample is not None and (sample.parted or sample.leaving or activity_of(view).kind is Activity.SCRIPT_ENDED)


def _may_be_earlier(view: RankView) -> bool:
    last = acting_stack(view)[-1:]
    unread = any(is_own(frame) and not frame.text for frame in last)
    return unread and not view.activity and activity_of(view).kind in {None, Activity.THREAD}


def name_of_training_thread(sample: Sample) -> str:
    """As Python calls it."""
    return next((thread.name for thread in sample.threads if thread.main and sample.thread), MAIN_THREAD)


def _threads_of(view: RankView) -> Iterable[str]:
    """Where the other threads of a rank stand, where it waits for one of them."""
    if view.sample is None or not view.sample.all_threads or not activity_of(view).waits_for_thread:
        return
    others = [thread for thread in view.sample.threads if not thread.main]
    for death in view.sample.deaths:
        own = own_frame(death.frames)
        yield f"rank {view.rank}: its thread {death.name} ended with {death.failure}{f' at {frame_text(own)}' if own else ''}"
    if not others:
        yield f"rank {view.rank} has no other thread that runs Python"
    for thread in others[:MAX_THREADS]:
        frame = own_frame(thread.frames)
        yield f"rank {view.rank}: its thread {thread.name} is in {frame_text(frame) if frame else 'C code'}"


def _holder_words(view: RankView) -> str:
    """Who has the lock that a rank waits for."""
    holder = view.lock.holder if view.lock else FileHolder()
    if holder.pid is not None:
        return f"process {holder.pid} on {view.host} has it open"
    return f"no visible process on {view.host} has it open{f', but {holder.doubt}' if holder.doubt else ''}"


def wakes_again_and_again(view: RankView) -> bool:
    """Whether the training thread goes round a loop with sleeps in it, as one that polls or works in small pieces."""
    return view.wakes >= MIN_WAKES


def polls_child(view: RankView) -> bool:
    """Whether a rank goes round a loop that asks whether a process that it has started still runs, as one does."""
    return bool(view.polls) and view.children > 0 and wakes_again_and_again(view)
