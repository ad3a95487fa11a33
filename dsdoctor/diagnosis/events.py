"""An event that a line shows -> the timeline of the log. Nothing is searched here."""

from dsdoctor.diagnosis.above import Above
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.timeline import Timeline


def add_event(timeline: Timeline, event: Event, text: str, raw: bytes, line: int, above: Above) -> None:
    """Tell the timeline what a line shows. ``text``: the clean part of it that shows it; ``raw``: all of it."""
    if event in {Event.EXCEPTION, Event.USAGE}:
        timeline.exception(raw, text, line)
    elif event in {Event.SUITE_BEGAN, Event.SUITE_CAPTURED}:
        timeline.suite.note(event, line)
    elif event is Event.TRACEBACK:
        timeline.begin_traceback(raw, text, line)
    elif event is Event.ERROR_FILE:
        timeline.note_error_file(text)
    elif event is Event.CHAINED:
        timeline.chain(raw)
    elif event is Event.IGNORED:
        timeline.ignored = line
    elif event is Event.CRASHED:
        timeline.crash(raw, text, line)
    elif event is Event.EXITED:
        timeline.end(raw, text, line, lambda: list(above.lines)[-1:-8:-1])
    elif event is Event.NO_NUMBER:
        timeline.nans.note(raw, line, timeline.recent)
    elif event is Event.WATCHDOG:
        timeline.give_up(raw, line)
    elif event is Event.RECOVERED:
        timeline.recover(raw, line)
    elif event is Event.MISSING:
        timeline.wait(text)
    elif event is Event.WORK:
        timeline.note_collective(text)
    elif event is Event.WORLD:
        timeline.world = int(text.partition("dist_world_size=")[2].split()[0].strip("',"))
