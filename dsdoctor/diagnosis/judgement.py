"""The hits, the exceptions and the exits of a log -> the verdict: which one is the cause, what only follows, or nothing.

The first failure of a process's own beats what other processes say about it.
"""

import re
from dataclasses import dataclass, replace

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.diagnosis.combined_runs import of_one_server
from dsdoctor.diagnosis.consequences import (
    WAITING,
    ended_before_its_exit,
    failed_at,
    is_of_a_build,
    is_of_something_before,
    line_is_of_before,
    standing,
    stopped_at,
    was_borne,
    well_until,
    went_on_after,
)
from dsdoctor.diagnosis.exits import Exit
from dsdoctor.diagnosis.failures import FOLLOWS, LOST, Failure
from dsdoctor.diagnosis.findings import (
    borne_of,
    echoes_only,
    empty,
    finding_of,
    note_of,
    undecided_after,
    undecided_frame,
    undecided_log,
    unexplained,
    with_activity,
)
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Facts, Hit, Line, LogOutcome, Stage, Tier
from dsdoctor.diagnosis.origin import (
    FROM_OUTSIDE,
    Origin,
    belongs,
    broke_off_at_exit,
    ended_by_signal,
    ended_without_words,
    failure_of,
    interrupted,
    passed_over,
    where_hit,
)
from dsdoctor.diagnosis.progress import NO_PROGRAM
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import Timeline
from dsdoctor.diagnosis.waiting import with_modules, with_who_waited
from dsdoctor.rules import book

# Logs without an error line that are not well all the same: losses that are no numbers, an end in the middle of something.


SERIES = 3
"""So many losses in a row that are no numbers are no accident."""

SKIPPED = re.compile(rb"\bstep=(\d{1,9}), skipped=(\d{1,9})\b")
SCALE = re.compile(
    rb"(?:OVERFLOW!|[Oo]verflow detected\.).{0,80}Attempted loss scale: (\d{1,12}(?:\.\d{1,9})?), reducing to"
)
FEW_STEPS, MOSTLY_SKIPPED = 20, 0.8
HALVED, LOW_SCALE, AT_THE_END = 10, 16, 12
"""A search for the loss scale at the start ends far above this; one that goes on so low, up to the last lines, does not end."""

LAST_LINES = 6
BAR = re.compile(rb"\d{1,3}%\|[^|]{0,200}\|\s{0,9}(\d{1,9})/(\d{1,9}) \[")
ENDED = re.compile(rb"\b(?:100%|done|finished|completed?|saved|train_runtime|[Ss]uccess)")


def losses_are_nan(timeline: Timeline, last_line: int, facts: Facts) -> Finding | None:
    """Losses, or gradient norms, that became nan and stayed so."""
    series = timeline.nans
    if series.count < SERIES or series.finite_again(last_line, timeline.recent):
        return None
    if series.before:
        return _nan_in_the_backward(timeline, facts)
    return book.finding(
        "losses-are-nan",
        Severity.ERROR,
        evidence=(
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        value="gradient norm" if series.of_norms else "loss",
        since="" if series.step is None else f" from step {series.step}",
    )


def _nan_in_the_backward(timeline: Timeline, facts: Facts) -> Finding:
    """A loss that was a number, whose gradients were none: the backward pass made them, not the data nor the learning rate."""
    series = timeline.nans
    kernel = {"sdpa": "torch's SDPA", "eager": "eager attention"}.get((facts.attention or "").lower(), facts.attention)
    return book.finding(
        "losses-are-nan",
        Severity.ERROR,
        case="backward",
        evidence=(
            series.before,
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        attention=f" (attention in the log: {kernel})" if kernel else "",
    )


def steps_are_skipped(read: Scan) -> Finding | None:
    """fp16 overflows on nearly every step up to the end of the log: the counter of skipped steps, or a loss scale that sinks."""
    recent = list(read.timeline.recent)
    counted = [found for raw in recent for found in SKIPPED.finditer(raw)]
    if counted:
        steps, skipped = int(counted[-1][1]), int(counted[-1][2])
        if steps >= FEW_STEPS and skipped >= MOSTLY_SKIPPED * steps:
            text = counted[-1][0].decode("utf-8", "replace")
            return book.finding(
                "fp16-loss-scale-floor",
                Severity.ERROR,
                case="skipped",
                evidence=(f"near the end of the log: {text}",),
                skipped=skipped,
                steps_count=steps,
            )
    scales = [(age, float(found[1]), found[0]) for age, raw in enumerate(recent) if (found := SCALE.search(raw))]
    values = list(dict.fromkeys(value for _, value, _ in scales))
    sinks = len(values) >= HALVED and values == sorted(values, reverse=True) and values[-1] <= LOW_SCALE
    if sinks and len(recent) - scales[-1][0] <= AT_THE_END:
        text = scales[-1][2].decode("utf-8", "replace")
        return book.finding(
            "fp16-loss-scale-floor",
            Severity.ERROR,
            case="sinking",
            evidence=(f"near the end of the log: {text}",),
            first=f"{values[0]:g}",
            last=f"{values[-1]:g}",
        )
    return None


def cut_off(read: Scan) -> Finding | None:
    """A log that stops within a traceback, or within a progress bar."""
    begun = [one for mine in read.timeline.tracebacks.open.values() for one in mine]
    if begun and read.last_line - max(one.last for one in begun) < 20 and not read.timeline.failures:
        first = min(begun, key=lambda one: one.since)
        at = f"line {first.frames[-1].line} of {first.frames[-1].path}" if first.frames else f"line {first.since}"
        return book.finding(
            "log-cut-off",
            Severity.ERROR,
            case="traceback",
            evidence=(f"line {first.since}: Traceback (most recent call last):",),
            frame=at,
        )
    lines = [raw for raw in list(read.timeline.recent)[-LAST_LINES:] if raw.strip()]
    if _is_cut_json(read, lines):
        return book.finding("log-cut-off", Severity.WARNING, case="json", evidence=("the log ends at its last line",))
    bars = [found for raw in lines[-1:] for found in BAR.finditer(raw[-600:])]
    if bars and int(bars[-1][1]) < int(bars[-1][2]) and not any(ENDED.search(raw[-400:]) for raw in lines[-1:]):
        state = f"{int(bars[-1][1])} of {int(bars[-1][2])}"
        return book.finding("log-cut-off", Severity.WARNING, evidence=(f"the log ends at {state}",), state=state)
    return None


def _is_cut_json(read: Scan, lines: list[bytes]) -> bool:
    return read.begins_with_json and bool(lines) and lines[-1].strip()[-1:] not in {b"}", b"]"}


NEAR_THE_END = 60
"""An exception or an error so close to the end, in lines, is what ended the log."""

CERTIFICATE = "certificate-out-of-date"
VERSIONS = re.compile(r"\(from versions: (?!none\))")
"""The index had answered."""

NEVER_ALONE = {"op-silently-skipped", CERTIFICATE}
"""Rules whose warnings are no cause because nothing else says what failed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a log comes to; see Diagnosis."""

    outcome: LogOutcome
    findings: tuple[Finding, ...] = ()
    where: str = ""
    activity: str = ""
    follows: bool = False
    silent: bool = False


def judge(hits: list[Hit], facts: Facts, read: Scan, origin: Origin) -> Verdict:
    """The verdict on a log. ``hits``: the best of each rule, best first."""
    if not read.last_line:
        return Verdict(outcome=LogOutcome.EMPTY, findings=(empty(read.lines),))
    causes, probes, echoes = _sorted_hits(hits, read)
    failed = _failed(read, echoes)
    causes, demoted = standing(causes, read, origin)
    if failed and not causes:
        causes = _promoted(probes, echoes, read, origin)
    rules = {hit.rule.id for hit in causes}
    beside = [hit for hit in [*probes, *demoted] if hit.rule.id not in rules and not hit.quoted]
    notes = [_beside(hit, facts) for hit in beside]
    notes.sort(key=lambda finding: finding.severity is Severity.NOTE)
    recovered = [hit for hit in causes if _recovered(hit, read)]
    causes = [hit for hit in causes if hit not in recovered]
    notes += [note_of(hit, facts) for hit in recovered]
    if causes and not _only_an_exit(causes[0], origin, read):
        return _of_causes(causes, notes, facts, read, origin)
    words = ended_before_its_exit(origin.ended, read) if failed and not causes else None
    if words and origin.ended:
        told = (broke_off_at_exit(origin.ended, words.text), *_of_a_well_log([*beside, *recovered], facts))
        return Verdict(outcome=LogOutcome.HEALTHY, findings=told)
    if failed:
        return _of_a_failure(causes, echoes, notes, facts, read, origin)
    quiet = losses_are_nan(read.timeline, read.last_line, facts) or steps_are_skipped(read) or cut_off(read)
    if quiet:
        outcome = LogOutcome.UNFINISHED if quiet.severity is Severity.WARNING else LogOutcome.CAUSE
        outcome = LogOutcome.UNEXPLAINED if quiet.rule == "log-cut-off" and outcome is LogOutcome.CAUSE else outcome
        return Verdict(outcome=outcome, findings=(quiet, *notes))
    return _by_evidence(_of_a_well_log([*beside, *recovered], facts), facts, read)


def _by_evidence(notes: tuple[Finding, ...], facts: Facts, read: Scan) -> Verdict:
    """The verdict on a log in which nothing is known to have failed: healthy only where something shows it."""
    health = read.health
    shown = max(health.progress, health.end, well_until(read), _last(read, Event.LOADED))
    ended = max(health.end, well_until(read))
    handled = read.timeline.tracebacks.handled_lines
    errors = [line for line in health.errors if line.number > ended and line.number not in handled]
    if errors and shown < errors[0].number and read.last_line - errors[-1].number <= NEAR_THE_END:
        told = unexplained(errors[0], facts, Origin())
        return Verdict(outcome=LogOutcome.UNEXPLAINED, findings=(told, *notes))
    if errors:
        undecided = undecided_after(errors[0])
    elif health.frame and health.frame.number > ended:
        undecided = undecided_frame(health.frame)
    elif not shown or read.errors:
        undecided = undecided_log(read, facts)
    else:
        return Verdict(outcome=LogOutcome.HEALTHY, findings=notes)
    silent = not errors and health.frame is None
    return Verdict(outcome=LogOutcome.UNDECIDED, findings=(undecided, *notes), silent=silent)


def _last(read: Scan, event: Event) -> int:
    marked = read.last.get(event)
    return marked.number if marked else 0


def _of_a_well_log(hits: list[Hit], facts: Facts) -> tuple[Finding, ...]:
    """What is told of a log that shows no failure: warnings first; a line that would be a cause is told as only said."""
    borne = [hit.tier is not Tier.PROBE and not hit.signature.stands for hit in hits]
    notes = [borne_of(hit, facts) if only else _beside(hit, facts) for hit, only in zip(hits, borne, strict=True)]
    return tuple(sorted(notes, key=lambda finding: finding.severity is Severity.NOTE))


def _sorted_hits(hits: list[Hit], read: Scan) -> tuple[list[Hit], list[Hit], list[Hit]]:
    """The causes, the probes and the echoes."""
    echoes = sorted((hit for hit in read.hits.values() if hit.tier >= Tier.ECHO), key=lambda hit: hit.line)
    return (
        [hit for hit in hits if hit.tier <= Tier.GENERIC],
        [hit for hit in hits if hit.tier is Tier.PROBE],
        echoes,
    )


def _of_causes(causes: list[Hit], notes: list[Finding], facts: Facts, read: Scan, origin: Origin) -> Verdict:
    """A rule knows what went wrong."""
    findings = _causes(causes, facts)
    first = next(hit for hit in _by_standing(causes))
    mine = origin.failure is not None and belongs(first, origin.failure)
    follows = first.rule.id in WAITING and first.tier is Tier.GENERIC
    if follows:
        findings[0] = with_who_waited(findings[0], first, read.timeline, facts)
    elif first.rule.id == "collectives-differ":
        findings[0] = with_modules(findings[0], first, facts)
    findings[0] = _with_what_came_before(findings[0], first, origin)
    if not follows:
        findings[0] = _with_the_place(findings[0], first, failure_of(first, origin, read.timeline))
    activity = origin.activity if mine else ""
    findings[0] = with_activity(findings[0], activity)
    return Verdict(
        outcome=LogOutcome.CAUSE,
        findings=(*findings, *notes),
        where="" if follows else origin.where if mine else where_hit(first, read.timeline),
        activity=activity,
        follows=follows,
    )


def _with_the_place(finding: Finding, hit: Hit, failure: Failure | None) -> Finding:
    """The cause, with the place in the user's own files where it arose, where the hit has not named it."""
    frame = failure.frame if failure else None
    if frame is None or not frame.own or any(frame.place in value for value in hit.groups.values()):
        return finding
    return replace(finding, evidence=(*finding.evidence, f"your code stood at {frame}"))


def _with_what_came_before(finding: Finding, first: Hit, origin: Origin) -> Finding:
    """The cause, with an exception before it that no rule knows: where nothing says whose lines they are, it may be the cause."""
    failure = origin.failure
    if failure and belongs(first, failure):
        return replace(finding, evidence=(*finding.evidence, *passed_over(origin)))
    if failure is None or not failure.frames or failure.line >= first.line:
        return finding
    if failure.speaker.number is not None or first.tier <= Tier.FILE:
        return finding
    at = f", at {failure.frame}" if failure.frame else ""
    told = f"before it, line {failure.line}: {failure.text[:160]}{at}; if that ended its process, it is the cause"
    return replace(finding, evidence=(*finding.evidence, told))


def _of_a_failure(
    causes: list[Hit], echoes: list[Hit], notes: list[Finding], facts: Facts, read: Scan, origin: Origin
) -> Verdict:
    """No rule knows what went wrong: the own words of the process that failed first, or how it ended."""
    failure, ended = origin.failure, origin.ended
    where, doing = origin.where, origin.activity
    echoes = [hit for hit in echoes if not is_of_something_before(hit, origin, read)]
    if _built(echoes, read, origin) and not _unknown_error(read, echoes, origin):
        return Verdict(outcome=LogOutcome.ONLY_ECHOES, findings=(echoes_only(echoes, facts), *notes))
    if failure and failure.text.startswith("KeyboardInterrupt"):
        told = interrupted(origin, failure.line, failure.text)
        nan = losses_are_nan(read.timeline, read.last_line, facts)
        first = (with_activity(nan, doing), told) if nan else (told,)
        return Verdict(outcome=LogOutcome.CAUSE, findings=(*first, *notes), activity=origin.activity)
    if failure and (failure.native or not _better_known(read, origin)):
        outcome = LogOutcome.RAISED if failure.raised_by_the_script else LogOutcome.UNEXPLAINED
        first_words = Line(failure.line, failure.text)
        told = unexplained(first_words, facts, origin, more=passed_over(origin), doing=doing)
        return Verdict(outcome=outcome, findings=(told, *notes), where=where, activity=doing)
    stopped = next((one for one in read.timeline.failures if "SignalException" in one.text), None)
    if ended and ended.signal and not _better_known(read, origin) and (ended.signal not in FROM_OUTSIDE or not stopped):
        rule = causes[0].rule.id if causes else "died-by-signal"
        return Verdict(
            outcome=LogOutcome.CAUSE,
            findings=(ended_by_signal(ended, origin, rule=rule), *notes),
            where=where,
            activity=doing,
        )
    line = Line(stopped.line, stopped.text) if stopped else stopped_at(read)
    before = line and ended and ended.line < line.number and ended.signal not in FROM_OUTSIDE
    if line and not before:
        # somebody ends a run that learns nothing any more
        nan = losses_are_nan(read.timeline, read.last_line, facts)
        told = interrupted(origin, *line)
        first = (with_activity(nan, doing), told) if nan else (told,)
        return Verdict(outcome=LogOutcome.CAUSE, findings=(*first, *notes), activity=origin.activity)
    if ended and not _better_known(read, origin):
        words = read.timeline.last_words
        if line := Line(*words) if words else _error_by_form(ended, read):
            told = unexplained(line, facts, origin, doing=doing)
            return Verdict(outcome=LogOutcome.UNEXPLAINED, findings=(told, *notes), where=where, activity=doing)
        told = ended_without_words(ended, origin)
        return Verdict(outcome=LogOutcome.ONLY_ECHOES, findings=(told, *notes), where=where, activity=doing)
    told = unexplained(_worst_line(read, echoes, origin), facts, origin)
    return Verdict(outcome=LogOutcome.UNEXPLAINED, findings=(told, *notes))


def _error_by_form(ended: Exit, read: Scan) -> Line | None:
    """A line before the end of a process that is an error by its form, and neither a launcher's nor known otherwise."""
    timeline = read.timeline
    known = {one.line for group in (timeline.failures, timeline.survived, timeline.exits) for one in group}
    known |= timeline.tracebacks.handled_lines
    for line in read.health.errors:
        another = NO_PROGRAM.search(line.text) or FOLLOWS.search(line.text)
        if line.number < ended.line and line.number not in known and not another:
            return line
    return None


def _only_an_exit(hit: Hit, origin: Origin, read: Scan) -> bool:
    """Whether a hit is nothing but the signal by which the first process ended."""
    ended = origin.ended
    if hit.rule.stage is not Stage.RUN or origin.failure or not (ended and ended.signal):
        return False
    same = any(one.line == hit.line and one.signal == ended.signal for one in read.timeline.exits)
    return same and (hit.tier is Tier.GENERIC or hit.text.endswith("Killed"))


def _better_known(read: Scan, origin: Origin) -> bool:
    """Whether a line of the GPU or of a compiler says more than the exception."""
    failure = origin.failure
    late = failure is not None and not is_of_a_build(failure)
    return any(not (late and failure and line.number > failure.line) for line in _first_hand(read, origin))


def _first_hand(read: Scan, origin: Origin) -> list[Line]:
    """What the GPU or a compiler said first, unless it is of something before the failure that began it."""
    found = [read.first[event] for event in (Event.GPU_FAULT, Event.COMPILER_ERROR) if event in read.first]
    return [line for line in found if not line_is_of_before(line, read.writers[line.number], origin, read)]


def _built(echoes: list[Hit], read: Scan, origin: Origin) -> bool:
    """Whether something was being built, and the log only repeats that it failed."""
    if any(hit.tier is Tier.ECHO for hit in echoes):
        return True
    began, done = read.last.get(Event.BUILDING), read.last.get(Event.LOADED)
    over = began is None or (done is not None and done.number > began.number) or read.timeline.step is not None
    return bool(echoes) and not over and origin.failure is None and not (origin.ended and origin.ended.signal)


def _failed(read: Scan, echoes: list[Hit]) -> bool:
    """Whether the log shows a failure after which it did not end well."""
    failed = failed_at(read)
    complained = read.last.get(Event.COMPLAINED)
    left = [one.line for one in read.timeline.failures if not was_borne(one, read)]
    all_left = len(left) == len(read.timeline.failures) and not read.timeline.survived
    last = read.last_exception if all_left else max(left, default=0)
    # why: a mere complaint before further steps is none of the end
    borne = complained and (complained.number <= read.timeline.last_step_line or went_on_after(complained, read))
    complaint = complained.number if complained and not borne else 0
    error_line = max(last, complaint)
    crashed = max((one.line for one in read.timeline.failures if one.native), default=0)
    repeated = max((hit.line for hit in echoes if hit.tier is Tier.ECHO), default=0)
    # why: an error after which the training went on did not end it
    error_line = error_line if error_line >= read.timeline.went_on_until else 0
    near_the_end = error_line if error_line > read.last_line - NEAR_THE_END else 0
    ends = max((one.line for one in read.timeline.exits), default=0)
    exited = any(one.line == failed for one in read.timeline.exits)
    mark = failed if failed > max(read.timeline.survived_exit, 0 if exited else read.timeline.went_on_until) else 0
    certain = max(mark, repeated, crashed, ends)
    return max(certain, near_the_end) > well_until(read, certain)


def _beside(hit: Hit, facts: Facts) -> Finding:
    """What is no cause: a note, or a warning where it is true of the result however well the log ended."""
    return finding_of(hit, facts, Severity.WARNING) if hit.signature.stands else note_of(hit, facts)


def _recovered(hit: Hit, read: Scan) -> bool:
    """Whether the log ended well after this line, and nothing failed after that."""
    if hit.signature.stands or hit.rule.id == "op-silently-skipped":
        return False
    failed = failed_at(read)
    return well_until(read, failed) > max(hit.line, failed, read.last_exception)


def _promoted(probes: list[Hit], echoes: list[Hit], read: Scan, origin: Origin) -> list[Hit]:
    """The probe to report as the cause: it is about the op that failed, or nothing says what failed."""
    failed_ops = {hit.op for hit in echoes if hit.op}
    trained = read.timeline.step is not None or bool(origin.ended and origin.ended.signal)
    explained_elsewhere = trained or Event.COMPILER_ERROR in read.first or _not_an_echo(read.exception, echoes)
    about = [hit for hit in probes if hit.op in failed_ops] if failed_ops or explained_elsewhere else probes
    rules = {hit.rule.id for hit in about}
    left = [hit for hit in about if hit.rule.id not in NEVER_ALONE and not rules & set(hit.rule.explained_by)]
    return [_as_cause(hit) for hit in left[:1]]


def _as_cause(probe: Hit) -> Hit:
    """The probe with the rule's own title where its own calls it harmless."""
    title = "" if probe.signature.harmless else probe.signature.title
    return replace(probe, signature=replace(probe.signature, title=title))


def _unknown_error(read: Scan, echoes: list[Hit], origin: Origin) -> Line | None:
    """An error in the log that no rule knows, beyond "exit code 1"."""
    line = next(iter(_first_hand(read, origin)), None)
    # after a failed compile (an ECHO) an exception only repeats it
    ended_badly = all(hit.tier is Tier.EXIT for hit in echoes)
    return line or (_not_an_echo(read.exception, echoes) if ended_badly else None)


def first_failure(read: Scan) -> Line | None:
    """The first line by which a failure is known, without a look at what became of it; None where there is none."""
    marked = (read.exception, *(read.first.get(event) for event in (Event.FAILED, Event.COMPLAINED, Event.GPU_FAULT)))
    known = [line for line in marked if line]
    hits = [hit for hit in read.hits.values() if hit.tier is not Tier.PROBE]
    timeline = read.timeline
    known += [Line(one.line, one.text) for group in (timeline.failures, timeline.exits, hits) for one in group]
    return min(known, default=None, key=lambda line: line.number)


def _worst_line(read: Scan, echoes: list[Hit], origin: Origin) -> Line:
    """The line to show for a failure that no rule knows: each kind of line by which ``_failed`` knows one."""
    own = _unknown_error(read, echoes, origin) or read.exception or read.first.get(Event.FAILED)
    if line := own or read.first.get(Event.COMPLAINED) or read.last.get(Event.SUITE_FAILED):
        return line
    timeline = read.timeline
    secondary = [Line(one.line, one.text) for group in (timeline.failures, timeline.exits, echoes) for one in group]
    return secondary[0]


def _not_an_echo(line: Line | None, echoes: list[Hit]) -> Line | None:
    return line if line and all(hit.line != line.number for hit in echoes) else None


def _causes(causes: list[Hit], facts: Facts) -> list[Finding]:
    """The cause as an ERROR; its consequences, certain or possible, as NOTEs."""
    first_ones = _by_standing(causes)
    explained = [hit for hit in causes if hit not in first_ones]
    first, rest = first_ones[0], first_ones[1:]
    sure = first.tier <= Tier.NAMED
    findings = [finding_of(first, facts, Severity.ERROR)]
    for hit in rest:
        findings.append(finding_of(hit, facts, Severity.NOTE if sure and hit.tier is Tier.GENERIC else Severity.ERROR))
    findings += [finding_of(hit, facts, Severity.NOTE) for hit in explained]
    return sorted(findings, key=lambda finding: finding.severity is Severity.NOTE)


def _by_standing(causes: list[Hit]) -> list[Hit]:
    """The causes that no other one explains."""
    # why: that another process is gone explains nothing by itself
    named = [hit for hit in causes if not (hit.tier is Tier.GENERIC and LOST.search(hit.text))]
    return [hit for hit in causes if not any(_explains(other, hit) for other in named)] or causes


def _explains(cause: Hit, hit: Hit) -> bool:
    """Whether a problem only follows from another one; from a server's certificate only what the same server did not give."""
    if cause.rule.id not in hit.rule.explained_by or VERSIONS.search(hit.text):
        return False
    return cause.rule.id != CERTIFICATE or cause.line == hit.line or of_one_server(cause.text, hit.text)
