"""Where a failure began, and how processes ended that told no cause."""

import re
from dataclasses import replace

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.diagnosis.exits import FROM_OUTSIDE, Exit, signal_name
from dsdoctor.diagnosis.failures import PASSES_ON, Failure
from dsdoctor.diagnosis.lines import Speaker, same_process
from dsdoctor.diagnosis.models import Hit
from dsdoctor.diagnosis.progress import activity
from dsdoctor.diagnosis.relations import COMPARED, Origin, Story, alike, belongs, is_cleared_up, passed_over
from dsdoctor.diagnosis.timeline import Timeline
from dsdoctor.rules import book

# A timeline -> where the failure began: the first process that failed by itself, on which ranks, and doing what.


A_WORKER = re.compile(r"(?:\w{1,60} )?pid=\d")
"""How Ray names the process that wrote a line."""

MESSAGE_BEGINS = 8
"""Within so many lines the traceback begins that another exception passes on."""


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
    where = _rank(ended.number) if ended and ended.number is not None else ""
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
    return _rank(roots.pop()) if len(roots) == 1 and not others and len(same) == 1 else ""


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
        return f"local {_rank(min(numbers))}" if local else _rank(min(numbers))
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


def _rank(number: int | None) -> str:
    return f"rank {number}"


# How a process ended, without a cause in the log -> findings: what is known, and what would decide. Never a guess.


SIGNAL_CASES = {
    1: "hangup",
    2: "interrupt",
    4: "illegal-instruction",
    6: "abort",
    7: "bus-error",
    8: "division",
    9: "kill",
    11: "segmentation-fault",
    15: "terminate",
}
STOPPED_CASES = {"SIGHUP": "hangup", "SIGINT": "interrupt"}


def ended_by_signal(ended: Exit, origin: Origin, *, rule: str = "") -> Finding:
    """A process was ended by a signal, and the log does not say why. ``rule``: that of what the log says of it."""
    number = ended.signal or 0
    finding = book.finding(
        "died-by-signal",
        Severity.ERROR,
        case=SIGNAL_CASES.get(number, ""),
        evidence=(*_evidence(ended), *perhaps_the_end(origin)),
        activity=f" {origin.activity}" if origin.activity else "",
        name=ended.name,
        number=number,
    )
    return replace(finding, rule=rule) if rule else finding


def broke_off_at_exit(ended: Exit, words: str) -> Finding:
    """A process whose training had ended well was ended by a signal while it exited."""
    return book.finding(
        "died-by-signal",
        Severity.WARNING,
        case="at-exit",
        evidence=(f"its last words: {words[:200]}", *_evidence(ended)),
        name=ended.name,
        number=ended.signal,
    )


def ended_without_words(ended: Exit, origin: Origin) -> Finding:
    """A process ended with an exit code, and no word of it is in the log."""
    return book.finding(
        "ended-without-words",
        Severity.ERROR,
        case="passed-over" if origin.passed_over else "",
        evidence=(*_evidence(ended), *perhaps_the_end(origin)),
        activity=f" {origin.activity}" if origin.activity else "",
        status=ended.name,
    )


def perhaps_the_end(origin: Origin) -> tuple[str, ...]:
    """An exception that was not taken for the cause, where that is not sure."""
    failure = origin.passed_over
    if failure is None:
        return ()
    at = f", at {failure.frame}" if failure.frame else ""
    unless = "the program went on after it, unless the lines behind it are of another process"
    return (f"before it, line {failure.line}: {failure.text[:160]}{at}; {unless}",)


def interrupted(origin: Origin, line: int, text: str) -> Finding:
    """Somebody, or the scheduler, stopped the whole run."""
    found = re.search(r"(?:got signal: |Received )(\d{1,2})\b|\b(SIG(?:TERM|INT|HUP))\b", text)
    named = (signal_name(int(found[1])) if found[1] else found[2]) if found else ""
    if text.startswith("KeyboardInterrupt"):
        named = "SIGINT"
    return book.finding(
        "ended-from-outside",
        Severity.ERROR,
        case=STOPPED_CASES.get(named, ""),
        evidence=(f"line {line}: {text[:300]}",),
        activity=f" {origin.activity}" if origin.activity else "",
        by=named or "its scheduler",
    )


def _evidence(ended: Exit) -> tuple[str, ...]:
    when = f" (pid {ended.pid} on {ended.host}, {ended.time})" if ended.time and ended.host else ""
    root = (f"torchrun names it as the root cause, the first process that failed{when}",) if ended.root else ()
    file = (f"its traceback is in {ended.error_file}",) if ended.error_file else ()
    return (f"line {ended.line}: {ended.text}", *root, *file)
