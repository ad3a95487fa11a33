"""The hits of a log -> those that may be the cause: what only follows, was survived or came later falls away."""

import re
from functools import lru_cache
from itertools import islice

from dsdoctor.diagnosis.exits import Exit
from dsdoctor.diagnosis.failures import EXCEPTION_LINE, FOLLOWS, LOST, Failure
from dsdoctor.diagnosis.lines import Speaker, are_two, same_process
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.mentions import NAMED
from dsdoctor.diagnosis.models import Hit, Line, Stage, Tier
from dsdoctor.diagnosis.origin import FROM_OUTSIDE, Origin, alike, belongs
from dsdoctor.diagnosis.progress import FINITE, STEP
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import LOSS, MESSAGE_LINES, NEAR_THE_END, was_left_behind

# A log -> the line up to which all is well: the program's own last words, or the exit code 0 of what had started it.
#
# An exit code alone proves little: behind a pipe it is that of the last program. It counts where the program had said that it
# was done, or where the training went on after the last thing that went wrong.


AT_EXIT = {6, 11}
"""SIGABRT and SIGSEGV: what destructors and threads that still run make of an exit."""

OF_A_TRAINING = re.compile(r"train_runtime|[Tt]rain|`max_")
EXITS = re.compile(
    rb"destroy_process_group\(\) was not called before program exit|End time of running main|Exception ignored in: <"
    rb"|wandb: (?:Synced|Waiting for W&B process to finish)|wandb: .{0,20}View run "
)
"""What a process prints when its program has come to its end."""

KNOWN_BY = 60
"""By so many letters of its text a line is found again."""


def well_until(read: Scan, failed: int = 0) -> int:
    """The last line that proves success, 0 if none does. ``failed``: the last line by which a process is known to have failed."""
    well, zero = _line(read, Event.ENDED_WELL), _line(read, Event.EXITED_ZERO)
    if zero <= well or failed > well:
        return well
    trouble = _last_trouble(read)
    if trouble is None or trouble.number > zero:
        return well if trouble else zero
    own = max(read.last_exception, max((one.line for one in read.timeline.failures), default=0))
    return zero if (well and own <= well) or went_on_after(trouble, read) else well


def ended_before_its_exit(ended: Exit | None, read: Scan) -> Line | None:
    """The words by which a training ended, where its process broke off only while it exited, and nothing had failed before."""
    well = read.last.get(Event.ENDED_WELL)
    if ended is None or well is None or ended.signal not in AT_EXIT or not OF_A_TRAINING.search(well.text):
        return None
    own = [one for one in read.timeline.failures if one.own]
    if own or read.timeline.first_watchdog or not 0 < ended.line - well.number < len(read.timeline.recent):
        return None
    between = islice(reversed(read.timeline.recent), read.last_line - ended.line, read.last_line - well.number + 1)
    return well if any(EXITS.search(raw[:2000]) for raw in between) else None


def stopped_at(read: Scan) -> Line | None:
    """Where the run was stopped from outside, unless it was started again and went on."""
    for line in (read.first.get(Event.STOPPED), read.last.get(Event.STOPPED)):
        if line and line.number > _line(read, Event.ENDED_WELL) and not went_on_after(line, read):
            return line
    return None


def was_started_again(line: int, read: Scan) -> bool:
    """Whether on this line something stopped a run that was started again, and goes on."""
    stops = {marked.number for marked in (read.first.get(Event.STOPPED), read.last.get(Event.STOPPED)) if marked}
    return line in stops and stopped_at(read) is None


def failed_at(read: Scan) -> int:
    """The last line that says that something failed, 0 if none does, or if it only stopped a run that was started again."""
    marked, stopped = read.last.get(Event.FAILED), read.last.get(Event.STOPPED)
    if suite := suite_failed(read):
        return max(suite.number, marked.number if marked else 0)
    if marked is None:
        return 0
    only_stopped = stopped is not None and stopped.number == marked.number and went_on_after(stopped, read)
    return 0 if only_stopped else marked.number


def suite_failed(read: Scan) -> Line | None:
    """The summary of a suite whose tests failed, where the log ends with it and no training is in the log.

    Who trains by running code prints such summaries all the time.
    """
    marked = read.last.get(Event.SUITE_FAILED)
    if marked is None or read.last_line - marked.number > NEAR_THE_END:
        return None
    trains = any(STEP.search(raw[-400:]) or LOSS.search(raw[-400:]) for raw in read.timeline.recent)
    return None if trains or read.timeline.step is not None else marked


def went_on_after(line: Line, read: Scan) -> bool:
    """Whether steps or losses follow a line, among the last lines of the log."""
    known = line.text[:KNOWN_BY].encode()
    for raw in islice(reversed(read.timeline.recent), max(0, read.last_line - line.number)):
        if known in raw:
            return False
        if _is_of_training(raw[-400:]):
            return True
    return False


@lru_cache(maxsize=1024)
def _is_of_training(raw: bytes) -> bool:
    """Whether a line has a step or a loss. The same last lines are asked for each exception of a log."""
    return bool(STEP.search(raw) or FINITE.search(raw))


def was_borne(failure: Failure, read: Scan) -> bool:
    """Whether a process said of an exception that it goes on without it, and did, and none is known to have ended."""
    if read.timeline.exits or not read.timeline.is_recovered(failure.line, failure.speaker):
        return False
    return went_on_after(Line(failure.line, failure.text), read)


def _line(read: Scan, event: Event) -> int:
    marked = read.last.get(event)
    return marked.number if marked else 0


def _last_trouble(read: Scan) -> Line | None:
    """The last exception or complaint."""
    marked = [line for event in (Event.EXCEPTION, Event.COMPLAINED) if (line := read.last.get(event))]
    failures = [Line(one.line, one.text) for one in read.timeline.failures]
    return max([*marked, *failures], default=None, key=lambda line: line.number)


# What a scheduler says of a job's end -> whether it ended a run that was well, or only cleared up behind a rank.


ENDS = {"job-time-limit", "job-preempted", "pod-evicted"}
"""Rules of a scheduler that ends a whole job."""

SOON = 200
"""Within so many lines after a scheduler's end its processes say what became of them."""

OF_A_SIGNAL = re.compile(r"[Ss]ignal|SIG[A-Z]{3,6}|KeyboardInterrupt|[Tt]erminat|[Pp]reempt|[Cc]ancel|[Tt]ime ?limit")
"""Words of an exception by which a script itself answers a signal of its scheduler."""


def clears_up(hit: Hit, read: Scan, origin: Origin) -> bool:
    """Whether a job or a step was cancelled only because one of its ranks had ended badly before.

    That a step was cancelled is what Slurm prints behind every rank that fails. A reason (a time limit, a preemption) is the
    cause, unless a rank had failed before it and the rest of the job waited for it until then.
    """
    if hit.rule.id not in {"job-time-limit", "job-preempted"}:
        return False
    plain = hit.tier is Tier.GENERIC
    by_itself = [one for one in read.timeline.exits if one.line < hit.line and one.signal not in FROM_OUTSIDE]
    if any(plain or not one.signal for one in by_itself):
        return True
    failure = origin.failure
    if failure is None or failure.line >= hit.line or (OF_A_SIGNAL.search(failure.text) and not plain):
        return False
    ended = failure.rooted or failure.native
    return ended or (plain and not went_on_after(Line(failure.line, failure.text), read))


def comes_after_its_end(hit: Hit, causes: list[Hit]) -> bool:
    """Whether the scheduler had ended the job just before a line that says little by itself: a killed worker, a lost rank."""
    if hit.tier is not Tier.GENERIC or hit.rule.id in ENDS:
        return False
    return any(one.rule.id in ENDS and 0 < hit.line - one.line <= SOON and not one.aside for one in causes)


# The hits of a log -> those that may be the cause: what only follows, was survived, came later or is only said is none.


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


def standing(causes: list[Hit], read: Scan, origin: Origin) -> tuple[list[Hit], list[Hit]]:
    """The hits that may be the cause, and those that only follow, were survived, or are of a later failure."""
    own = [failure for failure in read.timeline.failures if failure.own]
    same = [failure for failure in own if origin.failure and alike(failure, origin.failure)]
    told = {hit.rule.id for hit in read.hits.values() for failure in same if belongs(hit, failure)}
    borne = origin.failure is not None and read.timeline.is_recovered(origin.failure.line, origin.failure.speaker)
    kept = (set() if borne else told).union(*(hit.rule.explained_by for hit in causes))
    left = [
        hit
        for hit in causes
        if not (
            clears_up(hit, read, origin)
            or _follows(hit, read, origin)
            or comes_after_its_end(hit, causes)
            or was_survived(hit, read)
            or (not told and _is_later(hit, origin))
            or _is_only_said(hit, origin, read)
            or (hit.rule.id not in kept and is_of_something_before(hit, origin, read))
        )
    ]
    left = _without_recovered(left, kept, read, origin)
    return left, [hit for hit in causes if hit not in left]


def _follows(hit: Hit, read: Scan, origin: Origin) -> bool:
    """Whether a line is only what a process prints when another one has ended."""
    failure, ended = origin.failure, origin.ended
    says_so = bool(SAYS_ANOTHER_IS_GONE.search(hit.text)) or hit.rule.id == "nccl-collective-timeout"
    says_so = says_so or (hit.rule.id == "hccl-timeout" and not (failure and OF_NPUS.search(failure.text)))
    if failure and belongs(hit, failure) and (hit.line == failure.line or not says_so):
        return False
    if any(one.line == hit.line for one in read.timeline.exits):
        return failure is not None and hit.tier is Tier.GENERIC
    if hit.rule.id not in WAITING or hit.tier is not Tier.GENERIC or not says_so:
        return False
    if failure or Event.GPU_FAULT in read.first or (LOST.search(hit.text) and _ended_before(hit, read)):
        return True
    if not ended or ended.line == hit.line:
        return False
    if ended.signal:
        return (ended.root or ended.signal not in FROM_OUTSIDE) and not (
            ended.signal == SIGABRT and _gave_up(ended, read)
        )
    silent = ended.root and all(
        one.speaker.rank not in {ended.rank, None} for one in read.timeline.failures if one.follows
    )
    return silent and any(one.follows for one in read.timeline.failures)


def _ended_before(hit: Hit, read: Scan) -> bool:
    """Whether the run had been stopped, or a build had failed, before a process said that another one is gone."""
    stopped = stopped_at(read)
    if stopped and stopped.number < hit.line:
        return True
    return any(other.tier is Tier.ECHO for other in read.hits.values())


def _gave_up(ended: Exit, read: Scan) -> bool:
    """Whether the process that broke off had waited in vain before: a watchdog ends its process by SIGABRT."""
    if 0 < read.timeline.first_watchdog < ended.line:
        # why: a launcher ends all ranks soon after one broke off by itself, long before a watchdog gives up
        return True
    waiting = [one.speaker for one in read.timeline.failures if one.follows and not LOST.search(one.text)]
    return any(one.number in {ended.number, None} or ended.number is None for one in waiting)


def was_survived(hit: Hit, read: Scan) -> bool:
    """Whether the training went on after an error."""
    persists = hit.signature.persists or hit.rule.id in PERSISTING
    if persists:
        return False
    latest = max(hit.line, hit.latest)
    if was_started_again(latest, read):
        return True
    if hit.tier is Tier.GENERIC and latest <= read.timeline.survived_exit:
        return True
    if OUT_OF_DATE.search(hit.text) and went_on_after(Line(latest, hit.text), read):
        return True
    borne = [*read.timeline.survived, *(one for one in read.timeline.failures if was_borne(one, read))]
    if any(belongs(hit, one) and latest <= one.line + MESSAGE_LINES for one in borne):
        return True
    if latest < read.timeline.went_on_until and COMPLAINT.search(hit.text):
        return True
    well = not read.timeline.exits and not read.timeline.failures
    return latest < read.timeline.went_on_until and (well or read.timeline.is_recovered(latest, hit.speaker))


def _is_later(hit: Hit, origin: Origin) -> bool:
    """Whether another process says it after the first one had failed."""
    failure = origin.failure
    if not failure or hit.line <= failure.line or (hit.tier < Tier.NAMED and is_of_a_build(failure)):
        return False
    one, other = hit.speaker.number, failure.speaker.number
    return one is not None and other is not None and one != other


def is_of_something_before(hit: Hit, origin: Origin, read: Scan) -> bool:
    """Whether the program had gone on after the lines of a rule, until an exception of its own ended it."""
    stays = hit.signature.persists or (hit.rule.id in PERSISTING and not EXCEPTION_LINE.match(hit.sample))
    if stays or (hit.rule.stage in BUILDING and _is_about_what_was_built(origin.failure)):
        return False
    line = Line(max(hit.line, hit.latest), hit.text)
    return line_is_of_before(line, hit.speaker, origin, read, names_one=bool(EXCEPTION_LINE.match(hit.sample)))


def line_is_of_before(line: Line, speaker: Speaker, origin: Origin, read: Scan, *, names_one: bool = False) -> bool:
    """Whether a line that may be a cause is of something before the failure that began it, and none of it.

    ``names_one``: what it is known by is an exception's line.
    """
    failure = origin.failure
    if failure is None or failure.native:
        return False
    first = origin.ended is not None and origin.ended.root and origin.ended.rank == failure.speaker.rank
    another = first and are_two(speaker, failure.speaker)
    if was_left_behind(line.number, speaker, failure, read.timeline):
        return True
    if another and line.number < min(failure.since, read.timeline.went_on_to_exit):
        return True  # why: torchrun names the process that ended first, and the training went on until then
    if line.number >= failure.since or not _only_happened(failure):
        return False
    is_one = any(one.line == line.number for one in read.timeline.failures)
    if (is_one or not (names_one and NAMED.search(line.text))) and not failure.frames[-1].own:
        return False
    if same_process(speaker, failure.speaker):
        return failure.rooted
    return first and speaker.number is not None


def _is_about_what_was_built(failure: Failure | None) -> bool:
    """Whether an exception speaks of what a build had to make: that steps went on without it does not make it be there."""
    return failure is not None and bool(failure.frames) and bool(A_BUILD.search(failure.text))


def _without_recovered(hits: list[Hit], kept: set[str], read: Scan, origin: Origin) -> list[Hit]:
    """The hits without those just behind which a process said that it goes on, where something else may be the cause."""
    left = [
        hit
        for hit in hits
        if hit.signature.persists
        or hit.rule.id in kept
        or not read.timeline.is_recovered(max(hit.line, hit.latest), hit.speaker)
    ]
    killed = origin.ended is not None and origin.ended.signal is not None and origin.ended.signal not in FROM_OUTSIDE
    return left if left or killed else hits


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


def _is_only_said(hit: Hit, origin: Origin, read: Scan) -> bool:
    """Whether a line only mentions what a process might fail of, and one failed of something else, or a training runs."""
    if not hit.aside:
        return False
    if origin.failure:
        # why: a message may have several lines, and quote another error
        mine = same_process(hit.speaker, origin.failure.speaker)
        last = origin.failure.line + (0 if hit.said or not mine else MESSAGE_LINES)
        return not (origin.failure.line <= hit.line <= last)
    if origin.ended is None:
        return read.timeline.step is not None and bool(A_FAILURE.search(hit.sample))
    return origin.ended.signal is not None
