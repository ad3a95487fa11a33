"""The hits of a log -> those that may be the cause: what only follows, was survived, came later or is only said is none."""

import re

from dsdoctor.diagnosis.exits import Exit
from dsdoctor.diagnosis.failures import EXCEPTION_LINE, FOLLOWS, LOST, Failure
from dsdoctor.diagnosis.left_behind import was_left_behind
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Hit, Line, Stage, Tier
from dsdoctor.diagnosis.origin import FROM_OUTSIDE, Origin, alike, belongs
from dsdoctor.diagnosis.said import NAMED
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.schedulers import clears_up, comes_after_its_end
from dsdoctor.diagnosis.speakers import Speaker, are_two, same_process
from dsdoctor.diagnosis.successes import stopped_at, was_borne, was_started_again, went_on_after
from dsdoctor.diagnosis.timeline import MESSAGE_LINES

SIGABRT = 6
WAITING = {"nccl-collective-timeout", "nccl-network-interface", "rendezvous-incomplete", "hccl-timeout"}
"""Rules of what the other ranks print when a rank has ended."""

PERSISTING = {"op-silently-skipped", "fp16-loss-scale-floor"}
"""Rules of what stays true although the training goes on."""

OUT_OF_DATE = re.compile(r"certificate (?:is not yet valid|has expired)")
SAYS_ANOTHER_IS_GONE = re.compile(
    f"{FOLLOWS.pattern}|unhandled system error|connectFullMesh|gloo/transport|ncclSystemError"
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
