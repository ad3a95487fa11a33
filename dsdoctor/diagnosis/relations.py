"""What the incidents of a log have to do with each other: each relation is a function with a name, and says why it holds.

A log is judged by a Story: all that was read of it, and what began its trouble. A relation answers with its ``because``, and with
"" where it does not hold; what it puts aside keeps that answer, which ``-v`` shows. Tests switch each one off by its name and count
the answers that change; one that changes none is removed.
"""

import posixpath
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from itertools import islice, takewhile
from typing import Concatenate, ParamSpec

from dsdoctor.diagnosis.catalogue import Event, Stage, Tier
from dsdoctor.diagnosis.lines import EXCEPTION_LINE, NAMED, Line
from dsdoctor.diagnosis.models import Hit
from dsdoctor.diagnosis.owner import PYTHON
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import (
    FINITE,
    FOLLOWS,
    FROM_OUTSIDE,
    LOSS,
    LOST,
    MESSAGE_LINES,
    PASSES_ON,
    STEP,
    SUITE_NEAR_THE_END,
    Exit,
    Failure,
    Speaker,
    Timeline,
    activity,
    are_two,
    same_process,
)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where it began. ``failure``: the first own exception or crash; ``ended``: how the first process ended.

    ``passed_over``: where there is none, the last own exception of the log, which its process seems to have survived; and one
    whose process only seems to have gone on because nothing says which process wrote the steps behind it.
    ``others``: the own exceptions that did not begin it, each with the reason.
    """

    failure: Failure | None = None
    ended: Exit | None = None
    passed_over: Failure | None = None
    others: tuple[tuple[Failure, str], ...] = ()
    where: str = ""
    activity: str = ""


class FailureIndex:
    """Failures by the lines that they cover: a log may have thousands, and each hit asks for those around it."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self._failures = sorted(failures, key=lambda one: one.line)
        self._lines = [one.line for one in self._failures]
        self._since = [one.since for one in self._failures]  # the first line of each, or of any after it
        for number in range(len(self._since) - 2, -1, -1):
            self._since[number] = min(self._since[number], self._since[number + 1])

    def around(self, line: int, message_lines: int = MESSAGE_LINES) -> Iterator[Failure]:
        """Those in whose traceback or message a line stands."""
        for number in range(bisect_left(self._lines, line - message_lines), len(self._failures)):
            if self._since[number] > line:
                return
            if self._failures[number].since <= line:
                yield self._failures[number]


@dataclass(frozen=True, kw_only=True)
class Story:
    """A log that was read, and what began its trouble. ``causes``: all hits that may be the cause. ``off``: relations left out."""

    read: Scan
    origin: Origin = Origin()
    causes: tuple[Hit, ...] = ()
    off: frozenset[str] = frozenset()

    @property
    def timeline(self) -> Timeline:
        """What became of each process."""
        return self.read.timeline

    def first(self, event: Event) -> Line | None:
        """The first line that shows an event."""
        return self.read.first.get(event)

    def last(self, event: Event) -> Line | None:
        """The last line that shows an event."""
        return self.read.last.get(event)

    def until(self, event: Event) -> int:
        """The number of the last line that shows an event; 0 where none does."""
        marked = self.read.last.get(event)
        return marked.number if marked else 0

    @cached_property
    def failures(self) -> FailureIndex:
        """The failures of the log, by their lines."""
        return FailureIndex(self.timeline.failures)

    @cached_property
    def survived_failures(self) -> FailureIndex:
        """The failures after which their process went on, by their lines."""
        return FailureIndex([*self.timeline.survived, *(one for one in self.timeline.failures if borne(self, one))])

    @cached_property
    def recoveries(self) -> list[tuple[int, Speaker]]:
        """The lines by which a process says that it goes on."""
        return [*self.timeline.recoveries]

    @cached_property
    def lines_by_place(self) -> dict[tuple[Speaker, tuple[str, str]], list[int]]:
        """The lines of the failures that a process raised from one place."""
        lines: dict[tuple[Speaker, tuple[str, str]], list[int]] = {}
        for one in (*self.timeline.survived, *self.timeline.failures):
            lines.setdefault((one.speaker, _place(one)), []).append(one.line)
        return lines


P = ParamSpec("P")

Related = Callable[Concatenate[Story, P], str]


def relation(name: str) -> Callable[[Related[P]], Related[P]]:
    """A relation under its name. Whoever asks a story without it hears that it does not hold."""

    def named(test: Related[P]) -> Related[P]:
        @wraps(test)
        def asked(story: Story, /, *given: P.args, **more: P.kwargs) -> str:
            return "" if name in story.off else test(story, *given, **more)

        asked.__dict__["relation"] = name
        return asked

    return named


# Whether a process, or the training, went on after a line. Steps of another process prove nothing of it, and words alone prove
# nothing of a process whose traceback begins where a program does: that one has ended, unless a process that is known to be the
# same dies again.
JUST_BEHIND = 5  # so many lines behind a failure a program says at most that it goes on
KNOWN_BY = 60  # by so many letters of its text a line is found again


@relation("rooted")
def ends_its_process(_: Story, failure: Failure) -> str:
    """Nothing can have caught it."""
    return "its traceback begins where the program does, so nothing caught it" if failure.rooted else ""


@relation("says-so")
def says_to_go_on(story: Story, line: int, speaker: Speaker | None) -> str:
    """There are words of going on just behind a line. ``speaker``: who wrote it; None where that is not known."""
    first = bisect_right(story.recoveries, line, key=lambda one: one[0])
    behind = takewhile(lambda one: one[0] <= line + JUST_BEHIND, islice(story.recoveries, first, None))
    said = next((at for at, one in behind if speaker is None or same_process(one, speaker)), 0)
    return f"line {said} says that the program goes on without it" if said else ""


def died_at(story: Story, line: int, speaker: Speaker | None) -> Failure | None:
    """The failure of this line that ended its process."""
    around = story.failures.around(line)
    of_it = (one for one in around if speaker is None or line == one.line or same_process(speaker, one.speaker))
    return next((one for one in of_it if ends_its_process(story, one)), None)


def is_recovered(story: Story, line: int, speaker: Speaker | None) -> str:
    """A process said, just behind this line, that it goes on, and had not ended with it."""
    said = says_to_go_on(story, line, speaker)
    return said if said and died_at(story, line, speaker) is None else ""


@relation("steps-between")
def steps_between(_: Story, line: int, speaker: Speaker | None, later: Failure) -> str:
    """Steps of the training stand between a line and a later failure."""
    two = speaker is not None and are_two(speaker, later.speaker)
    return f"steps of the training follow it before line {later.since}" if not two and line < later.went_on_from else ""


@relation("dies-again")
def dies_again(story: Story, died: Failure, later: Failure) -> str:
    """The process that a traceback seems to have ended said that it goes on, and was ended by a later one."""
    if not ends_its_process(story, later) or not same_process(died.speaker, later.speaker):
        return ""
    known = died.speaker.number is not None or len(story.timeline.ranks) <= 1
    return says_to_go_on(story, died.line, died.speaker) if known else ""


def left_behind(story: Story, line: int, speaker: Speaker | None, later: Failure) -> str:
    """The program went on after a line until a failure."""
    if line >= later.since:
        return ""
    if died := died_at(story, line, speaker):
        return dies_again(story, died, later)
    return steps_between(story, line, speaker, later) or is_recovered(story, line, speaker)


@relation("trained-after")
def trained_after(story: Story, line: Line) -> str:
    """Steps or losses follow a line, among the last lines of the log."""
    known = line.text[:KNOWN_BY].encode()
    behind = islice(reversed(story.timeline.recent), max(0, story.read.last_line - line.number))
    for age, raw in enumerate(behind):
        if known in raw:
            return ""
        if _is_of_training(raw[-400:]):
            return f"the training went on after it: line {story.read.last_line - age} is a step"
    return ""


@lru_cache(maxsize=1024)
def _is_of_training(raw: bytes) -> bool:
    """Whether a line has a step or a loss. The same last lines are asked for each exception of a log."""
    return bool(STEP.search(raw) or FINITE.search(raw))


@relation("borne")
def borne(story: Story, failure: Failure) -> str:
    """A process said of an exception that it goes on without it, and did, and none is known to have ended."""
    if story.timeline.exits:
        return ""
    if not is_recovered(story, failure.line, failure.speaker) and not comes_again(story, failure):
        return is_of_tried_code(story, failure)
    return trained_after(story, Line(failure.line, failure.text))


@relation("comes-again")
def comes_again(story: Story, failure: Failure) -> str:
    """The same process raises from the same place time after time, and goes on training in between: of samples, tasks, answers."""
    place = _place(failure)
    lines = story.lines_by_place.get((failure.speaker, place), []) if place != ("", "") else []
    if len(lines) < 2 or not story.timeline.stepped_between(min(lines), max(lines)):
        return ""
    return f"the same process raised from the same place on line {min(lines)} as well, and went on"


def _place(failure: Failure) -> tuple[str, str]:
    """The files in which a traceback begins and ends; of samples and of code that is tried only the folders differ."""
    frames = failure.frames
    return (posixpath.basename(frames[0].path), posixpath.basename(frames[-1].path)) if frames else ("", "")


TRIED = re.compile(r"^(?:/tmp/|/var/folders/|<string>|<stdin>|<sandbox|<exec)|/(?:sandbox|tmp\w{4,12})/")
"""Files that a program wrote only to run them."""


@relation("tried-code")
def is_of_tried_code(story: Story, failure: Failure) -> str:
    """It is all of code that a program wrote and ran in a process of its own, and the training went on after it."""
    own = all(TRIED.search(frame.path) for frame in failure.frames if frame.owner != PYTHON)
    if not failure.frames or not own or not TRIED.search(failure.frames[0].path):
        return ""
    return trained_after(story, Line(failure.line, failure.text))


# Where a log ends well. An exit code alone proves little: behind a pipe it is that of the last program. It counts where the program
# had said that it was done, or where the training went on after the last thing that went wrong.
COMMAND = re.compile(rb"[$#%] (?!echo )\S")
"""A command at a shell's prompt."""
AT_EXIT = {6, 11}  # SIGABRT and SIGSEGV: what destructors and threads that still run make of an exit
OF_A_TRAINING = re.compile(r"train_runtime|[Tt]rain|`max_")

EXITS = re.compile(
    rb"destroy_process_group\(\) was not called before program exit|End time of running main|Exception ignored in: <"
    rb"|wandb: (?:Synced|Waiting for W&B process to finish)|wandb: .{0,20}View run "
)
"""What a process prints when its program has come to its end."""


def well_until(story: Story, failed: int = 0) -> int:
    """The last line that proves success, 0 if none does. ``failed``: the last line by which a process is known to have failed."""
    well, asked = story.until(Event.ENDED_WELL), asked_status_is_zero(story)
    if asked > failed and is_of_one_program(story, asked):
        return asked
    zero = max(story.until(Event.EXITED_ZERO), asked)
    if zero <= well or failed > well:
        return well
    return zero if exited_with_zero(story, zero, well) else well


def asked_status_is_zero(story: Story) -> int:
    """The line on which a shell answers 0 to ``echo $?``; 0 where none does."""
    asked, recent = story.until(Event.ASKED_FOR_STATUS), story.timeline.recent
    age = story.read.lines - asked
    return asked + 1 if asked and 0 < age <= len(recent) and recent[-age].strip() == b"0" else 0


@relation("status-of-one-program")
def is_of_one_program(story: Story, asked: int) -> str:
    """The 0 on a line is the exit status of the program whose command stands before it: no pipe hides it behind another's."""
    before = islice(reversed(story.timeline.recent), story.read.lines - asked + 2, None)
    command = next((raw for raw in before if COMMAND.match(raw)), b"|")
    return "" if b"|" in command or b"&" in command else f"line {asked} is the exit status 0 of its command"


@relation("exit-zero")
def exited_with_zero(story: Story, zero: int, well: int) -> str:
    """The exit code 0 is that of a program after whose last trouble the training went on, or that had said that it is done."""
    trouble = _last_trouble(story)
    if trouble is not None and trouble.number > zero:
        return ""
    own = max(story.read.last_exception, max((one.line for one in story.timeline.failures), default=0))
    fine = trouble is None or (well and own <= well) or trained_after(story, trouble)
    return f"line {zero} has exit code 0" if fine else ""


def _last_trouble(story: Story) -> Line | None:
    """The last exception or complaint."""
    marked = [line for event in (Event.EXCEPTION, Event.COMPLAINED) if (line := story.last(event))]
    failures = [Line(one.line, one.text) for one in story.timeline.failures]
    return max([*marked, *failures], default=None, key=lambda line: line.number)


def ended_before_its_exit(story: Story) -> Line | None:
    """The words by which a training ended, where its process broke off only while it exited, and nothing had failed before."""
    ended, well = story.origin.ended, story.last(Event.ENDED_WELL)
    if ended is None or well is None or ended.signal not in AT_EXIT or not OF_A_TRAINING.search(well.text):
        return None
    own = [one for one in story.timeline.failures if one.own]
    recent = story.timeline.recent
    if own or story.timeline.first_watchdog or not 0 < ended.line - well.number < len(recent):
        return None
    last = story.read.last_line
    between = islice(reversed(recent), last - ended.line, last - well.number + 1)
    return well if any(EXITS.search(raw[:2000]) for raw in between) else None


def stopped_at(story: Story) -> Line | None:
    """Where the run was stopped from outside, unless it was started again and went on."""
    for line in (story.first(Event.STOPPED), story.last(Event.STOPPED)):
        if line and line.number > story.until(Event.ENDED_WELL) and not trained_after(story, line):
            return line
    return None


def failed_at(story: Story) -> int:
    """The last line that says that something failed, 0 if none does, or if it only stopped a run that was started again."""
    marked, stopped = story.last(Event.FAILED), story.last(Event.STOPPED)
    if suite := suite_failed(story):
        return max(suite.number, marked.number if marked else 0)
    if marked is None:
        return 0
    only_stopped = stopped is not None and stopped.number == marked.number and trained_after(story, stopped)
    return 0 if only_stopped else marked.number


def suite_failed(story: Story) -> Line | None:
    """The summary of a suite whose tests failed, where the log ends with it and no training is in the log.

    Who trains by running code prints such summaries all the time.
    """
    marked = story.last(Event.SUITE_FAILED)
    if marked is None or story.read.last_line - marked.number > SUITE_NEAR_THE_END:
        return None
    trains = any(STEP.search(raw[-400:]) or LOSS.search(raw[-400:]) for raw in story.timeline.recent)
    return None if trains or story.timeline.step is not None else marked


# A failure, and those after it -> why it did not begin the trouble.
MIN_CUT_LENGTH = 60  # so many letters of a message that a terminal cut are enough to know it by
COMPARED = 64  # so many of the first, and of the last, failures of a log are compared with each other
KILLED_TOGETHER = re.compile(r"srun: error: \S{1,80}: tasks [\d,-]{1,80}: Killed$")
"""How srun says that several tasks were killed at once."""


def passed_over(story: Story, failure: Failure, own: list[Failure], ended: Exit | None) -> str:
    """The program went on after a failure, until a later one, or until another process ended first."""
    later = [other for other in own if other.line > failure.line and not alike(other, failure)]
    for other in later:
        if because := left_behind(story, failure.line, failure.speaker, other):
            return because
    if again := borne(story, failure):
        return again
    if ends_its_process(story, failure) or failure.native:
        return ""
    return ended_by_another(story, failure, later) or another_rank_first(story, failure, ended)


@relation("ended-by-another")
def ended_by_another(story: Story, failure: Failure, later: list[Failure]) -> str:
    """A later exception ended the same process, so this one was caught."""
    ends = (one for one in later if ends_its_process(story, one) and same_process(one.speaker, failure.speaker))
    end = next(ends, None)
    return f"it was caught: line {end.line} ended the same process" if end else ""


@relation("another-rank-first")
def another_rank_first(story: Story, failure: Failure, ended: Exit | None) -> str:
    """torchrun names another rank as the first one that failed, and the training went on until then."""
    if ended is None or not ended.root or failure.speaker.rank in {None, ended.rank}:
        return ""
    went_on = is_recovered(story, failure.line, failure.speaker) or failure.line < story.timeline.went_on_to_exit
    return f"torchrun names rank {ended.rank} as the first that failed" if went_on else ""


@relation("cleared-up-by-srun")
def is_cleared_up(_: Story, ended: Exit, exits: list[Exit]) -> str:
    """srun killed all the tasks that were left, after one of them had ended by itself."""
    first = next((one for one in exits if one.line < ended.line and not one.signal), None)
    return f"srun killed the other tasks after line {first.line}" if first and KILLED_TOGETHER.match(ended.text) else ""


def alike(one: Failure, other: Failure) -> bool:
    """Whether two processes failed with the same words, but for numbers; a terminal may have cut one of them."""
    short, long = sorted((_words(one.text), _words(other.text)), key=len)
    return long == short or (len(short) >= MIN_CUT_LENGTH and long.startswith(short))


@lru_cache(maxsize=4 * COMPARED)
def _words(text: str) -> str:
    return re.sub(r"\d+|0x[0-9a-f]+", "", text)[:100]


MAX_MESSAGE_LINES = 60  # over how many lines the message of an exception may go on


def belongs(hit: Hit, failure: Failure) -> bool:
    """Whether a line that a rule knows is a part of a process's last words."""
    return failure.since <= hit.line <= failure.line + MAX_MESSAGE_LINES and (
        same_process(hit.speaker, failure.speaker) or hit.line == failure.line
    )


# A line that a rule knows -> why it is not the cause: what only follows, was survived, came later or is only said is none.
SIGABRT = 6

WAITING = {
    "nccl-collective-timeout",
    "nccl-network-interface",
    "rendezvous-incomplete",
    "hccl-timeout",
    "ray-worker-died",
}
"""Rules of what the other ranks print when a rank has ended."""

PERSISTING = {"op-silently-skipped", "fp16-loss-scale-floor"}
"""Rules of what stays true although the training goes on."""

ENDS = {"job-time-limit", "job-preempted", "pod-evicted"}  # rules of a scheduler that ends a whole job
SOON = 200  # within so many lines after a scheduler's end its processes say what became of them
OF_A_SIGNAL = re.compile(r"[Ss]ignal|SIG[A-Z]{3,6}|KeyboardInterrupt|[Tt]erminat|[Pp]reempt|[Cc]ancel|[Tt]ime ?limit")
"""Words of an exception by which a script itself answers a signal of its scheduler."""

OUT_OF_DATE = re.compile(r"certificate (?:is not yet valid|has expired)")

SAYS_ANOTHER_IS_GONE = re.compile(
    f"{FOLLOWS.pattern}|Worker exit type: |actor is dead because|unhandled system error|connectFullMesh|gloo/transport"
    "|ncclSystemError"
)

OF_NPUS = re.compile(r"[Hh]ccl|NPU function error|InnerRunOpApi|[Aa]clrt|npuSynchronize|ACL stream")
"""An exception of the runtime of NPUs, below which it says itself that it waited."""

A_FAILURE = re.compile(
    r"rror\b|ERROR|Exception|[Ff]ail|FAIL|[Cc]ould not|[Cc]annot|[Kk]illed|No such|not found|refused|fatal"
)
"""Words of a wording by which a program says that it fails. Others are told by loggers in the first place."""

COMPLAINT = re.compile(r"rror\b|ERROR|Exception|[Ff]ailed|FAILED|could not")

BUILDS = re.compile(r"op_builder|setup\.py|cpp_extension|torch/utils/_triton|setuptools|subprocess\.py")
"""Files through which a program comes that compiles something."""

A_LIBRARY = re.compile(
    r"\.so\b|[Cc]ompil|[Bb]uil[dt]|[Ee]xtension|ninja|nvcc|ds_\w|[Kk]ernel|\bops?\b|CUDA|[Tt]riton|module named|import"
)
"""Words of an exception that may come of a failed build."""

BUILDING = {Stage.COMPILE, Stage.LINK, Stage.JIT, Stage.LOAD}

A_BUILD = re.compile(r"\b[Ee]xtension\b|[Bb]uil[dt]\b|[Cc]ompiled?\b|\.so\b")
"""Words of an exception about what a build was to make."""


@relation("clears-up")
def clears_up(story: Story, hit: Hit) -> str:
    """A job or a step was cancelled only because one of its ranks had ended badly before.

    That a step was cancelled is what Slurm prints behind every rank that fails. A reason (a time limit, a preemption) is the
    cause, unless a rank had failed before it and the rest of the job waited for it until then.
    """
    if hit.rule.id not in {"job-time-limit", "job-preempted"}:
        return ""
    plain, failure = hit.tier is Tier.GENERIC, story.origin.failure
    by_itself = (one for one in story.timeline.exits if one.line < hit.line and one.signal not in FROM_OUTSIDE)
    if before := next((one for one in by_itself if plain or not one.signal), None):
        return f"a process had ended by itself before: line {before.line}"
    if failure is None or failure.line >= hit.line or (OF_A_SIGNAL.search(failure.text) and not plain):
        return ""
    ended = ends_its_process(story, failure) or failure.native
    ended = ended or (plain and not trained_after(story, Line(failure.line, failure.text)))
    return f"a process had failed before: line {failure.line}" if ended else ""


INSTALLS = {"pip-resolution-impossible", "pip-no-matching-version", "pip-network", "pip-environment-protected"}
"""Rules of an installation that failed: what is missing afterwards it did not install."""

NOT_INSTALLED = {"command-not-found", "python-dep-missing"}


@relation("install-failed-before")
def was_not_installed(story: Story, hit: Hit) -> str:
    """A program or a package is missing because the installation before it failed."""
    if hit.rule.id not in NOT_INSTALLED:
        return ""
    before = (one for one in story.causes if one.rule.id in INSTALLS and one.line < hit.line and not one.aside)
    failed = next((one for one in before if not survived(story, one)), None)
    return f"the installation of line {failed.line} failed before" if failed else ""


ALREADY = re.compile(r"already exists|[Aa]lready (?:in use|been (?:used|taken))|name .{1,80} is (?:already )?taken")
"""Words of an exception by which a second attempt meets what the first one left."""


@relation("second-attempt")
def is_of_a_second_attempt(story: Story, failure: Failure) -> str:
    """The task was started again after its worker had died, and met what the first attempt had left."""
    if not ALREADY.search(failure.text):
        return ""
    died = next(
        (one for one in story.causes if one.rule.id in DIED and one.line < failure.since and not one.aside), None
    )
    return f"the worker of line {died.line} had died, and its task was started again" if died else ""


DIED = {"ray-worker-died", "host-ram-oom", "crashed-in-native-code"}


@relation("after-the-end")
def comes_after_its_end(story: Story, hit: Hit) -> str:
    """The scheduler had ended the job just before a line that says little by itself: a killed worker, a lost rank."""
    if hit.tier is not Tier.GENERIC or hit.rule.id in ENDS:
        return ""
    ends = (one for one in story.causes if one.rule.id in ENDS and 0 < hit.line - one.line <= SOON and not one.aside)
    end = next(ends, None)
    return f"the scheduler had ended the job before: line {end.line}" if end else ""


@relation("how-it-ended")
def is_how_it_ended(story: Story, hit: Hit) -> str:
    """The line of a launcher that says how a process ended, whose own exception is known."""
    failure = story.origin.failure
    known = failure is not None and hit.tier is Tier.GENERIC and not (failure and _is_its_own(story, hit, failure))
    if known and failure and any(one.line == hit.line for one in story.timeline.exits):
        return f"it only says how a process ended; line {failure.line} is an exception"
    return ""


@relation("another-is-gone")
def follows_another(story: Story, hit: Hit) -> str:
    """A line is only what a process prints when another one has ended."""
    failure, ended = story.origin.failure, story.origin.ended
    if failure and _is_its_own(story, hit, failure):
        return ""
    if any(one.line == hit.line for one in story.timeline.exits):
        return ""
    if hit.rule.id not in WAITING or hit.tier is not Tier.GENERIC or not _says_another_is_gone(story, hit):
        return ""
    if failure and is_of_a_second_attempt(story, failure):
        return ""
    if failure:
        return f"it only says that another process is gone or does not come; line {failure.line} is an own exception"
    if Event.GPU_FAULT in story.read.first or (LOST.search(hit.text) and _ended_before(story, hit)):
        return "it only says that another process is gone, and something else had failed before"
    if not ended or ended.line == hit.line:
        return ""
    told = f"it only says that another process is gone; line {ended.line} says how that one ended"
    if ended.signal:
        first = ended.root or ended.signal not in FROM_OUTSIDE
        return told if first and not gave_up(story, ended) else ""
    waited = [one for one in story.timeline.failures if one.follows]
    silent = ended.root and waited and all(one.speaker.rank not in {ended.rank, None} for one in waited)
    return told if silent else ""


def _says_another_is_gone(story: Story, hit: Hit) -> bool:
    failure = story.origin.failure
    if SAYS_ANOTHER_IS_GONE.search(hit.text) or hit.rule.id == "nccl-collective-timeout":
        return True
    return hit.rule.id == "hccl-timeout" and not (failure and OF_NPUS.search(failure.text))


def _is_its_own(story: Story, hit: Hit, failure: Failure) -> bool:
    """Whether a line is a part of the last words of the process that failed first, and says more than that another is gone."""
    return belongs(hit, failure) and (hit.line == failure.line or not _says_another_is_gone(story, hit))


def _ended_before(story: Story, hit: Hit) -> bool:
    """Whether the run had been stopped, or a build had failed, before a process said that another one is gone."""
    stopped = stopped_at(story)
    if stopped and stopped.number < hit.line:
        return True
    return any(other.tier is Tier.ECHO for other in story.read.hits.values())


@relation("gave-up")
def gave_up(story: Story, ended: Exit) -> str:
    """The process that broke off had waited in vain before: a watchdog ends its process by SIGABRT."""
    if ended.signal != SIGABRT:
        return ""
    if 0 < story.timeline.first_watchdog < ended.line:
        # why: a launcher ends all ranks soon after one broke off by itself, long before a watchdog gives up
        return f"a watchdog had given up before: line {story.timeline.first_watchdog}"
    waiting = [one for one in story.timeline.failures if one.follows and not LOST.search(one.text)]
    known = (one for one in waiting if one.speaker.number in {ended.number, None} or ended.number is None)
    waited = next(known, None)
    return f"it had waited in vain: line {waited.line}" if waited else ""


def survived(story: Story, hit: Hit) -> str:
    """The training went on after an error."""
    if hit.signature.persists or hit.rule.id in PERSISTING:
        return ""
    latest = Line(max(hit.line, hit.latest), hit.text)
    return (
        trusted_later(story, latest)
        or survived_by_its_process(story, hit, latest)
        or survived_by_the_training(story, hit, latest)
    )


@relation("trusted-later")
def trusted_later(story: Story, latest: Line) -> str:
    """A server's certificate was out of date, and the training did not need that server."""
    return trained_after(story, latest) if OUT_OF_DATE.search(latest.text) else ""


@relation("survived-by-its-process")
def survived_by_its_process(story: Story, hit: Hit, latest: Line) -> str:
    """It stands in an exception after which its process went on."""
    known = story.survived_failures
    stands_in_one = any(known.around(latest.number))
    of_it = stands_in_one and any(belongs(hit, one) for one in known.around(hit.line, MAX_MESSAGE_LINES))
    return "its process took further steps after it" if of_it else ""


@relation("survived-by-the-training")
def survived_by_the_training(story: Story, hit: Hit, latest: Line) -> str:
    """Steps follow it up to the first thing that ended a process, or up to the end."""
    timeline = story.timeline
    if latest.number >= timeline.went_on_until:
        return ""
    well = not timeline.exits and not timeline.failures
    if COMPLAINT.search(hit.text) or well or is_recovered(story, latest.number, hit.speaker):
        return f"the training went on after it until line {timeline.went_on_until}"
    return ""


@relation("another-failed-first")
def is_later(story: Story, hit: Hit) -> str:
    """Another process says it after the first one had failed."""
    failure = story.origin.failure
    if not failure or hit.line <= failure.line or (hit.tier < Tier.NAMED and is_of_a_build(failure)):
        return ""
    one, other = hit.speaker.number, failure.speaker.number
    later = one is not None and other is not None and one != other
    return f"rank {other} had failed before: line {failure.line}" if later else ""


@relation("of-something-before")
def is_of_something_before(story: Story, hit: Hit) -> str:
    """The program had gone on after the lines of a rule, until an exception of its own ended it."""
    stays = hit.signature.persists or (hit.rule.id in PERSISTING and not EXCEPTION_LINE.match(hit.sample))
    if stays or (hit.rule.stage in BUILDING and _is_about_what_was_built(story.origin.failure)):
        return ""
    line = Line(max(hit.line, hit.latest), hit.text)
    return line_is_of_before(story, line, hit.speaker, names_one=bool(EXCEPTION_LINE.match(hit.sample)))


def line_is_of_before(story: Story, line: Line, speaker: Speaker, *, names_one: bool = False) -> str:
    """A line that may be a cause is of something before the failure that began it, and none of it.

    ``names_one``: what it is known by is an exception's line.
    """
    failure, ended = story.origin.failure, story.origin.ended
    if failure is None or failure.native:
        return ""
    if because := left_behind(story, line.number, speaker, failure):
        return because
    first = ended is not None and ended.root and ended.rank == failure.speaker.rank
    if first and are_two(speaker, failure.speaker) and line.number < min(failure.since, story.timeline.went_on_to_exit):
        return f"the training went on after it until rank {failure.speaker.rank} failed"
    if line.number >= failure.since or not _only_happened(failure):
        return ""
    is_one = any(one.line == line.number for one in story.timeline.failures)
    if (is_one or not (names_one and NAMED.search(line.text))) and not failure.frames[-1].own:
        return ""
    if same_process(speaker, failure.speaker):
        return f"line {failure.line} ended the same process" if ends_its_process(story, failure) else ""
    return (
        f"torchrun names rank {failure.speaker.rank} as the first that failed"
        if first and speaker.number is not None
        else ""
    )


def _is_about_what_was_built(failure: Failure | None) -> bool:
    """Whether an exception speaks of what a build had to make: that steps went on without it does not make it be there."""
    return failure is not None and bool(failure.frames) and bool(A_BUILD.search(failure.text))


def _only_happened(failure: Failure) -> bool:
    """Whether nobody raised an exception on purpose, perhaps for something above it, and nothing was being built."""
    if not failure.frames or failure.native or is_of_a_build(failure):
        return False
    last = failure.frames[-1]
    return not (last.own and last.source.startswith("raise "))


def is_of_a_build(failure: Failure) -> bool:
    """Whether what failed may be about something that was compiled or loaded; what has no frames may always be."""
    if not failure.frames or failure.native or A_LIBRARY.search(failure.text):
        return True
    return any(BUILDS.search(frame.path) for frame in failure.frames)


@relation("only-said")
def is_only_said(story: Story, hit: Hit) -> str:
    """A line only mentions what a process might fail of, and one failed of something else, or a training runs."""
    if not hit.aside:
        return ""
    failure, ended = story.origin.failure, story.origin.ended
    told = "it is a warning or a quotation, and no failure"
    if failure:
        # why: a message may have several lines, and quote another error
        mine = same_process(hit.speaker, failure.speaker)
        last = failure.line + (0 if hit.said or not mine else MESSAGE_LINES)
        return "" if failure.line <= hit.line <= last else told
    if ended is None:
        return told if story.timeline.step is not None and A_FAILURE.search(hit.sample) else ""
    return told if ended.signal is not None else ""


def standing(story: Story) -> tuple[list[Hit], list[tuple[Hit, str]]]:
    """The hits that may be the cause; and those that only follow, were survived, or are of a later failure, with the reason."""
    origin, causes = story.origin, story.causes
    own = [failure for failure in story.timeline.failures if failure.own]
    same = [failure for failure in own if origin.failure and alike(failure, origin.failure)]
    told = {hit.rule.id for hit in story.read.hits.values() for failure in same if belongs(hit, failure)}
    recovered = origin.failure is not None and is_recovered(story, origin.failure.line, origin.failure.speaker)
    kept = (set() if recovered else told).union(*(hit.rule.explained_by for hit in causes))

    def because(hit: Hit) -> Iterator[str]:
        yield clears_up(story, hit)
        yield was_not_installed(story, hit)
        yield is_how_it_ended(story, hit)
        yield follows_another(story, hit)
        yield comes_after_its_end(story, hit)
        yield survived(story, hit)
        if not told:
            yield is_later(story, hit)
        yield is_only_said(story, hit)
        if hit.rule.id not in kept:
            yield is_of_something_before(story, hit)

    reasons = {id(hit): next((reason for reason in because(hit) if reason), "") for hit in causes}
    return [hit for hit in causes if not reasons[id(hit)]], [
        (hit, reasons[id(hit)]) for hit in causes if reasons[id(hit)]
    ]


# A timeline -> where the failure began: the first process that failed by itself, on which ranks, and doing what.
A_WORKER = re.compile(r"(?:\w{1,60} )?pid=\d")  # how Ray names the process that wrote a line
MESSAGE_BEGINS = 8  # within so many lines the traceback begins that another exception passes on


def origin_of(story: Story) -> Origin:
    """The first failure of a process's own."""
    timeline = story.timeline
    ended = first_exit(story)
    own = sorted((failure for failure in timeline.failures if failure.own), key=lambda failure: failure.line)
    some = own if len(own) <= 2 * COMPARED else [*own[:COMPARED], *own[-COMPARED:]]
    reasons = {one.line: passed_over(story, one, some, ended) for one in some}
    left = [one for one in some if not reasons[one.line]]
    of_the_root = [one for one in left if ended and ended.root and one.speaker.rank == ended.rank is not None]
    failure = next(iter([*of_the_root, *left]), None)
    others = tuple((one, reasons[one.line]) for one in some if reasons[one.line])
    if failure:
        failure = _passed_on(failure, own)
        if not failure.frames:
            frames = next((other.frames for other in own if other.frames and alike(other, failure)), ())
            failure = replace(failure, frames=frames)
        return Origin(
            failure=failure,
            ended=ended,
            passed_over=_perhaps_the_end(failure, timeline),
            others=others,
            where=_where_failed(failure, own, timeline),
            activity=activity(failure.frames, failure.step),
        )
    where = f"rank {ended.number}" if ended and ended.number is not None else ""
    if ended and not where and _is_one_of_several(ended.host, timeline):
        where = ended.host
    borne = max([*own, *(one for one in timeline.survived if one.own)], default=None, key=lambda one: one.line)
    doing = activity((), timeline.step) if ended else ""
    return Origin(ended=ended, passed_over=borne, others=others, where=where, activity=doing)


def _perhaps_the_end(failure: Failure, timeline: Timeline) -> Failure | None:
    """The last exception that may have ended one of several processes, though steps of nobody knows whom follow it."""
    several = len(timeline.ranks) > 1 or any(one.local for one in timeline.exits)
    before = [
        one
        for one in timeline.survived
        if one.own
        and one.rooted
        and one.speaker.number is None
        and one.line < failure.since
        and not alike(one, failure)
    ]
    return before[-1] if several and before else None


def _passed_on(failure: Failure, own: list[Failure]) -> Failure:
    """The exception that another one only passes on, its traceback in its own message."""
    if not PASSES_ON.match(failure.text):
        return failure
    below = (one for one in own if failure.line < one.line and one.since <= failure.line + MESSAGE_BEGINS)
    first = next((one for one in below if same_process(one.speaker, failure.speaker)), None)
    if first and not first.frames and failure.raised_by_the_script:
        return replace(failure, text=f"{failure.text}; the first of them: {first.text}")
    return first or failure


def first_exit(story: Story) -> Exit | None:
    """The process that ended first: torchrun says which one; else one that no other process ended."""
    exits = story.timeline.exits
    root = [one for one in exits if one.root and one.rank is not None]
    signals = [
        one for one in exits if one.signal and one.signal not in FROM_OUTSIDE and not is_cleared_up(story, one, exits)
    ]
    others = [one for one in exits if one.signal not in FROM_OUTSIDE]
    return next((group[0] for group in (root, signals, others, exits) if group), None)


def failure_of(hit: Hit, origin: Origin, timeline: Timeline) -> Failure | None:
    """The failure in whose traceback or message a line stands: of a group of exceptions each has its own."""
    others = [one for one in timeline.failures if one.since <= hit.line and belongs(hit, one)]
    nearest = max(others, default=None, key=lambda one: (one.line == hit.line, one.since))
    return origin.failure if nearest and origin.failure and nearest.line == origin.failure.line else nearest


def where_hit(hit: Hit, timeline: Timeline) -> str:
    """On which ranks the lines of a rule stand."""
    numbers = {speaker.number for speaker in hit.speakers} - {None}
    return _ranks({number for number in numbers if number is not None}, hit.speaker, timeline)


def _where_failed(failure: Failure, own: list[Failure], timeline: Timeline) -> str:
    same = [other for other in own if alike(other, failure)]
    numbers = {other.speaker.number for other in same if other.speaker.number is not None}
    if numbers or _is_one_of_several(failure.speaker.host, timeline):
        return _ranks(numbers, failure.speaker, timeline)
    world = max(timeline.world, len(timeline.ranks))
    if world > 1 and len(same) >= world:
        return "all ranks"
    roots = {one.rank for one in timeline.exits if one.root and one.rank is not None}
    others = [one for one in timeline.exits if one.rank is not None and not one.root and one.signal not in FROM_OUTSIDE]
    return f"rank {roots.pop()}" if len(roots) == 1 and not others and len(same) == 1 else ""


def _ranks(numbers: set[int], speaker: Speaker, timeline: Timeline) -> str:
    """Ranks in words."""
    if not numbers:
        return speaker.host if _is_one_of_several(speaker.host, timeline) else ""
    known = timeline.ranks
    if len(numbers) > 1 and numbers >= known:
        return "all ranks"
    local = (
        speaker.rank is None
        and speaker.task is None
        and any(one.rank != one.local for one in timeline.exits if one.root)
    )
    if len(numbers) == 1:
        return f"{'local ' if local else ''}rank {min(numbers)}"
    named = ", ".join(str(number) for number in sorted(numbers)[:6])
    return f"ranks {named}{', ...' if len(numbers) > 6 else ''}"


def _is_one_of_several(host: str, timeline: Timeline) -> bool:
    """Whether other lines begin with a name that differs only in its number, as those of nodes and pods do, or are of other
    workers of Ray."""
    if A_WORKER.match(host):
        return any(other.host != host and A_WORKER.match(other.host) for other in timeline.speakers)
    stem = re.sub(r"\d+", "", host)
    return bool(host) and any(
        stem == re.sub(r"\d+", "", other.host) != other.host != host for other in timeline.speakers
    )


@relation("only-an-exit")
def only_an_exit(story: Story, hit: Hit) -> str:
    """A hit is nothing but the signal by which the first process ended."""
    ended = story.origin.ended
    if hit.rule.stage is not Stage.RUN or story.origin.failure or not (ended and ended.signal):
        return ""
    same = any(one.line == hit.line and one.signal == ended.signal for one in story.timeline.exits)
    only = same and (hit.tier is Tier.GENERIC or hit.text.endswith("Killed"))
    return f"it is how the process of line {ended.line} ended" if only else ""


@relation("better-known")
def better_known(story: Story) -> str:
    """A line of the GPU or of a compiler says more than the exception."""
    failure = story.origin.failure
    late = failure is not None and not is_of_a_build(failure)
    more = (line for line in first_hand(story) if not (late and failure and line.number > failure.line))
    line = next(more, None)
    return f"line {line.number} says more" if line else ""


def first_hand(story: Story) -> list[Line]:
    """What the GPU or a compiler said first, unless it is of something before the failure that began it."""
    found = [line for event in (Event.GPU_FAULT, Event.COMPILER_ERROR) if (line := story.first(event))]
    return [line for line in found if not line_is_of_before(story, line, story.read.writers[line.number])]


@relation("was-built")
def was_built(story: Story, echoes: list[Hit]) -> str:
    """Something was being built, and the log only repeats that it failed."""
    echo = next((hit for hit in echoes if hit.tier is Tier.ECHO), None)
    if echo is None:
        began, done, ended = story.until(Event.BUILDING), story.until(Event.LOADED), story.origin.ended
        over = not began or done > began or story.timeline.step is not None
        own = story.origin.failure is not None or (ended is not None and ended.signal is not None)
        echo = echoes[0] if echoes and not over and not own else None
    return f"line {echo.line} says that a build failed" if echo else ""


@relation("ended-well-after")
def ended_well_after(story: Story, hit: Hit) -> str:
    """The log ended well after this line, and nothing failed after that."""
    if hit.signature.stands or hit.rule.id == "op-silently-skipped":
        return ""
    failed = failed_at(story)
    well = well_until(story, failed)
    return f"the log ends well after it: line {well}" if well > max(hit.line, failed, story.read.last_exception) else ""
