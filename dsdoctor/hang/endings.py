"""How ranks ended -> which of them ended first, for the others only followed; and what to do about each kind of end. Judges,
never looks."""

from collections.abc import Sequence

from dsdoctor.core.finding import Step, step
from dsdoctor.hang.models import RankView
from dsdoctor.hang.stacks import own_frame, place
from dsdoctor.ranks.peers import says_another_is_gone

KILLED, ASKED_TO_END = "killed by ", ("SIGTERM", "SIGINT", "SIGHUP")
"""Launchers and people end ranks by these signals."""
QUIET = "exit status 0"
ABORT = (
    "the program has ended itself (abort), and its own words stand on its stderr: C++ does so when an exception is not caught, "
    "gloo when the sizes of a collective differ between ranks, NCCL's watchdog at a timeout"
)
CRASH = "it crashed in C code: have Python write the line that called it"
SENT = "somebody has sent that: a person, a scheduler, or the launcher, whose own log then says why"
LEFT = "see which line ends the process with that status: sys.exit, os._exit, also in a thread or a library"
CRASHED = (CRASH, (step("export PYTHONFAULTHANDLER=1"), step("dmesg -T | grep -E 'segfault|trap' | tail")))
BY_SIGNAL: dict[str, tuple[str, tuple[Step, ...]]] = {
    "SIGKILL": (
        "read what that rank printed last, and ask the kernel",
        (step("dmesg -T | grep -iE 'killed process|oom' | tail"),),
    ),
    "SIGABRT": (ABORT, ()),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"), CRASHED),
    **dict.fromkeys(ASKED_TO_END, (SENT, ())),
}


def first_of(ranks: Sequence[RankView]) -> tuple[int, ...]:
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


def is_asked(view: RankView) -> bool:
    """Whether a rank was asked to end by a signal."""
    return view.ended.startswith(KILLED) and view.ended.endswith(ASKED_TO_END)


def next_step(view: RankView) -> tuple[str, tuple[Step, ...]]:
    """What to do about the end of a rank."""
    signal_name = view.ended.removeprefix(KILLED) if view.ended.startswith(KILLED) else ""
    if signal_name:
        return BY_SIGNAL.get(signal_name, ("read what that rank printed last", ()))
    if _failure(view):
        return "read its traceback: what the other ranks report came after that", ()
    if view.ended.startswith("exit status "):
        return LEFT, ()
    return "read what that rank printed last", ()


def last_seen(view: RankView) -> str:
    """Where a rank that has ended was, as a sentence; "" at its regular end, and where no line of the user's was seen."""
    sample = view.sample
    if sample is None:
        return ""
    if own := own_frame(sample.failed_in):
        return f"rank {view.rank} raised it at {place(own)}"
    if sample.leaving:
        return ""
    own = own_frame(next((thread.frames for thread in sample.threads if thread.main), ()), only=True)
    age = max(0.0, view.ended_at - sample.time) if view.ended_at else 0.0
    before = f", {age:.1f} s before its end," if view.ended_at else ""
    return f"rank {view.rank} was last seen{before} at {place(own)}" if own else ""


def _failure(view: RankView) -> str:
    return view.sample.failure if view.sample else ""


def _says_so(view: RankView) -> bool:
    return says_another_is_gone(_failure(view))
