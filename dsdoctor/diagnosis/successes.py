"""A log -> the line up to which all is well: the program's own last words, or the exit code 0 of what had started it.

An exit code alone proves little: behind a pipe it is that of the last program. It counts where the program had said that it
was done, or where the training went on after the last thing that went wrong.
"""

import re
from functools import lru_cache
from itertools import islice

from dsdoctor.diagnosis.exits import Exit
from dsdoctor.diagnosis.failures import Failure
from dsdoctor.diagnosis.losses import FINITE
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Line
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.stages import STEP
from dsdoctor.diagnosis.suites import LOSS, NEAR_THE_END

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
