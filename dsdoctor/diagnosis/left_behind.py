"""A line of a log, and a failure after it -> whether the program had gone on between them. The one test for it; all use it.

Steps of another process prove nothing of it, and words alone prove nothing of a process whose traceback begins where a
program does: that one has ended, unless a process that is known to be the same dies again.
"""

from dsdoctor.diagnosis.failures import Failure
from dsdoctor.diagnosis.speakers import Speaker, are_two, same_process
from dsdoctor.diagnosis.timeline import Timeline


def was_left_behind(line: int, speaker: Speaker | None, later: Failure, timeline: Timeline) -> bool:
    """Whether steps of the training, or words of the process itself, show that it went on after a line until a failure.

    ``speaker``: who wrote the line; None where that is not known.
    """
    if line >= later.since:
        return False
    died = timeline.died_at(line, speaker)
    if died:
        return _dies_again(died, later, timeline)
    two = speaker is not None and are_two(speaker, later.speaker)
    return (not two and line < later.went_on_from) or timeline.is_recovered(line, speaker)


def _dies_again(died: Failure, later: Failure, timeline: Timeline) -> bool:
    """Whether the process that a traceback seems to have ended said that it goes on, and was ended by a later one."""
    if not later.rooted or not same_process(died.speaker, later.speaker):
        return False
    known = died.speaker.number is not None or len(timeline.ranks) <= 1
    return known and timeline.says_to_go_on(died.line, died.speaker)
