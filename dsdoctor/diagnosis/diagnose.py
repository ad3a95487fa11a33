"""A log -> its Diagnosis: the cause first, then independent problems, then what is harmless."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.redaction import definitions, urls
from dsdoctor.diagnosis.catalogue import Event, Tier
from dsdoctor.diagnosis.combined import combined_hits, contradicted, of_its_package, of_one_server
from dsdoctor.diagnosis.findings import (
    answer_to,
    borne_of,
    broke_off_at_exit,
    echoes_only,
    empty,
    ended_by_signal,
    ended_without_words,
    finding_of,
    interrupted,
    links,
    not_the_cause,
    note_of,
    partly_searched,
    perhaps_the_end,
    reader_failed,
    rest_of_block,
    undecided,
    undecided_log,
    unexplained,
    with_activity,
    with_place,
    with_what_came_before,
)
from dsdoctor.diagnosis.health import cut_off, ends_within, losses_are_nan, stands_still, steps_are_skipped
from dsdoctor.diagnosis.lines import JsonLines, Line
from dsdoctor.diagnosis.models import Diagnosis, Facts, Hit, LogOutcome
from dsdoctor.diagnosis.relations import (
    WAITING,
    Origin,
    Story,
    belongs,
    better_known,
    borne,
    ended_before_its_exit,
    ended_well_after,
    failed_at,
    failure_of,
    first_hand,
    is_of_something_before,
    only_an_exit,
    origin_of,
    standing,
    stopped_at,
    survived,
    trained_after,
    was_built,
    well_until,
    where_hit,
)
from dsdoctor.diagnosis.scan import Patterns, Scan, scan
from dsdoctor.diagnosis.timeline import FOLLOWS, FROM_OUTSIDE, LOST, MESSAGE_LINES, NO_PROGRAM, Exit
from dsdoctor.diagnosis.waiting import with_modules, with_who_waited

MAX_PASSED_OVER = 8  # so many exceptions that no rule knows are told with the reason why they are not the cause
NEAR_THE_END = 60  # an exception or an error so close to the end, in lines, is what ended the log
CERTIFICATE = "certificate-out-of-date"
WARNED_IN_C = re.compile(r"\[W\d{0,4} ?[^\]]{0,80}\.(?:cpp|cc|h):\d")  # a warning of torch's C++, as glog writes it

VERSIONS = re.compile(r"\(from versions: (?!none\))")  # the index had answered
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


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What there is to choose from. ``causes``: the hits that nothing explains; ``echoes``: those that only say that it ended
    badly; ``notes``: what is told beside; ``beside``: the hits of a log that shows no failure.
    """

    story: Story
    facts: Facts
    causes: tuple[Hit, ...]
    echoes: tuple[Hit, ...]
    notes: tuple[Finding, ...]
    beside: tuple[Hit, ...]

    @property
    def read(self) -> Scan:
        """The log."""
        return self.story.read

    @property
    def origin(self) -> Origin:
        """Where the trouble began."""
        return self.story.origin

    def verdict(self, outcome: LogOutcome, *findings: Finding, placed: bool = True) -> Verdict:
        """A verdict with these findings before the notes. ``placed``: it is told where it began."""
        where = self.origin.where if placed else ""
        return Verdict(outcome=outcome, findings=(*findings, *self.notes), where=where, activity=self.origin.activity)


NUMBERED = re.compile(r"^((?:before it, |\d{1,9} such lines, the last one is )?line )(\d{1,12})\b")
"""How evidence names a line of the log."""


def diagnose(lines: Iterable[bytes | str], *, name: str = "", patterns: Patterns | None = None) -> Diagnosis:
    """Read a log once and say what went wrong first. Never raises, whatever the log holds. ``patterns``: see ``scan``.

    >>> log = ["[rank1]: ninja: build stopped: subcommand failed.", "x.h:6:10: fatal error: cusparse.h: No such file or directory"]
    >>> [finding.rule for finding in diagnose(log).findings]
    ['cuda-header-missing']
    """
    read = scan(lines, patterns)
    try:
        return diagnosis_of(read, name=name)
    except Exception as error:  # the last resort: what was read is shown, though it could not be judged
        read.note_error(error)
        return _without_judgement(read, name=name)


def diagnosis_of(read: Scan, *, name: str = "", without: Iterable[str] = ()) -> Diagnosis:
    """What a log that was read comes to. ``without``: relations that are left out, by their names."""
    story = Story(read=read, off=frozenset(without))
    facts = read.fact_reader.facts()
    read.hits = {number: hit for number, hit in read.hits.items() if not contradicted(hit, facts)}
    read.hits = {number: of_its_package(hit, facts) for number, hit in read.hits.items()}
    combined = combined_hits([*read.hits.values()], facts, read)
    found = [*(of_its_package(hit, facts) for hit in combined), *read.hits.values()]
    found = _ranked(found, found)
    hits = _best_of_each_rule(found, {id(hit) for hit in found if survived(story, hit)})
    return _as_diagnosis(judge(hits, facts, replace(story, origin=origin_of(story))), read, facts, name)


def _without_judgement(read: Scan, *, name: str) -> Diagnosis:
    """The verdict by marks alone, where judging the log failed."""
    failed = first_failure(read)
    findings = (unexplained(failed, Facts(), Origin()),) if failed else ()
    outcome = LogOutcome.UNEXPLAINED if failed else LogOutcome.UNDECIDED
    return _as_diagnosis(Verdict(outcome=outcome, findings=findings), read, Facts(), name)


def _as_diagnosis(verdict: Verdict, read: Scan, facts: Facts, name: str) -> Diagnosis:
    """A verdict as it is shown: the first finding with the ranks on which it began, and what could not be read."""
    findings = [*verdict.findings]
    if read.partly.lines:
        # it may be about the cause, unless that was found
        severity = Severity.NOTE if verdict.outcome is LogOutcome.CAUSE else Severity.WARNING
        findings.append(partly_searched(read, severity))
    if read.errors:
        findings.append(reader_failed(read))
    shown = [_as_shown(finding, read.records) for finding in findings]
    without_ranks = shown[0].title if verdict.findings else ""
    if verdict.findings and verdict.where and shown[0].severity is not Severity.NOTE:
        shown[0] = replace(shown[0], title=f"{verdict.where}: {without_ranks}")
    return Diagnosis(
        name=name,
        lines=read.records.line_of_file(read.lines),
        outcome=verdict.outcome,
        facts=facts,
        findings=tuple(shown),
        where=verdict.where,
        activity=verdict.activity,
        follows=verdict.follows,
        silent=verdict.silent,
        without_ranks=without_ranks,
    )


def _as_shown(finding: Finding, records: JsonLines) -> Finding:
    """A finding whose quotations hold no credentials of an address and no value of a definition, and that names the lines as the
    file counts them, where one line of it held several.
    """
    evidence = tuple(urls(definitions(line)) for line in finding.evidence)
    if records.has_several:
        evidence = tuple(
            NUMBERED.sub(lambda at: f"{at[1]}{records.line_of_file(int(at[2]))}", line) for line in evidence
        )
    return replace(finding, title=urls(definitions(finding.title)), evidence=evidence)


def _ranked(hits: Iterable[Hit], found: list[Hit]) -> list[Hit]:
    """Best first; what is only mentioned last. ``found``: all hits of the log.

    Of lines that say little, one that another process is gone says least.
    Of those that say as much, what C++ only warned of comes behind an error, since it tried another way after it; unless a later
    line names the same host.
    """

    def rank(hit: Hit) -> tuple[bool, int, bool, int]:
        weak = bool(LOST.search(hit.text)) if hit.tier is Tier.GENERIC else bool(WARNED_IN_C.search(hit.text))
        host = hit.groups.get("peer", "").partition(",")[0]
        if weak and host and hit.tier is not Tier.GENERIC:
            weak = not any(host in other.text and not WARNED_IN_C.search(other.text) for other in found)
        return hit.aside, hit.tier, weak, hit.line

    return sorted(hits, key=rank)


def _best_of_each_rule(ranked: list[Hit], survived: set[int]) -> list[Hit]:
    """The best hit of every rule, one that was survived only where there is no other. Causes and probes of a rule count
    together, its echoes apart.
    """
    best: dict[tuple[str, bool], Hit] = {}
    for hit in sorted(ranked, key=lambda hit: id(hit) in survived):
        best.setdefault((hit.rule.id, hit.tier >= Tier.ECHO), hit)
    return _ranked(best.values(), ranked)


def judge(hits: list[Hit], facts: Facts, story: Story) -> Verdict:
    """The verdict on a log. ``hits``: the best of each rule, best first."""
    read = story.read
    if not read.last_line:
        return Verdict(outcome=LogOutcome.EMPTY, findings=(empty(read.lines),))
    probes = [hit for hit in hits if hit.tier is Tier.PROBE]
    echoes = sorted((hit for hit in read.hits.values() if hit.tier >= Tier.ECHO), key=lambda hit: hit.line)
    story = replace(story, causes=tuple(hit for hit in hits if hit.tier <= Tier.GENERIC))
    failed = has_failed(story, echoes)
    causes, aside = standing(story)
    if failed and not causes:
        causes = _promoted(probes, echoes, story)
    rules = {hit.rule.id for hit in causes}
    because = {id(hit): reason for hit, reason in aside}
    beside = [hit for hit in [*probes, *(hit for hit, _ in aside)] if hit.rule.id not in rules and not hit.quoted]
    notes = [_beside(hit, facts, because.get(id(hit), "")) for hit in beside]
    notes.sort(key=lambda finding: finding.severity is Severity.NOTE)
    recovered = {id(hit): reason for hit in causes if (reason := ended_well_after(story, hit))}
    borne = [hit for hit in causes if id(hit) in recovered]
    notes += [note_of(hit, facts, recovered[id(hit)]) for hit in borne]
    if failed:
        told = {hit.line for hit in hits}
        others = [(one, reason) for one, reason in story.origin.others if one.line not in told]
        notes += [not_the_cause(one, reason) for one, reason in others[:MAX_PASSED_OVER]]
    choice = Choice(
        story=story,
        facts=facts,
        causes=tuple(hit for hit in causes if id(hit) not in recovered),
        echoes=tuple(echoes),
        notes=tuple(notes),
        beside=(*beside, *borne),
    )
    verdicts = (verdict for choose in (FAILED if failed else NOT_FAILED) if (verdict := choose(choice)))
    return next(verdicts)


# A log that shows a failure -> a verdict, by the first of these that has one.
def known_cause(choice: Choice) -> Verdict | None:
    """A rule knows what went wrong."""
    story, facts, origin = choice.story, choice.facts, choice.origin
    if not choice.causes or only_an_exit(story, choice.causes[0]):
        return None
    unexplained = _unexplained(choice.causes)
    first = unexplained[0]
    mine = origin.failure is not None and belongs(first, origin.failure)
    activity = origin.activity if mine else ""
    follows = first.rule.id in WAITING and first.tier is Tier.GENERIC
    where = "" if follows else origin.where if mine else where_hit(first, story.timeline)
    failure = None if follows else failure_of(first, origin, story.timeline)
    cause, *others = _causes(choice.causes, unexplained, facts)
    if follows:
        cause = with_who_waited(cause, first, story.timeline, facts)
    elif first.rule.id == "collectives-differ":
        cause = with_modules(cause, first, facts)
    cause = with_activity(with_place(with_what_came_before(cause, first, origin, mine=mine), first, failure), activity)
    before = min(first.line, failure.since) if failure else first.line
    linked = links(story.read, before, first.text, first.signature.fix or first.rule.fix)
    cause = replace(
        cause, evidence=(*cause.evidence, *rest_of_block(story.read, Line(first.line, first.text)), *linked)
    )
    return Verdict(
        outcome=LogOutcome.CAUSE,
        findings=(cause, *others, *choice.notes),
        where=where,
        activity=activity,
        follows=follows,
    )


def broken_at_exit(choice: Choice) -> Verdict | None:
    """The training had ended well, and a process broke off while it exited."""
    words, ended = ended_before_its_exit(choice.story), choice.origin.ended
    if not words or not ended or choice.causes:
        return None
    told = (broke_off_at_exit(ended, words.text), *_of_a_well_log(choice))
    return Verdict(outcome=LogOutcome.HEALTHY, findings=told)


def only_echoes(choice: Choice) -> Verdict | None:
    """Something was being built, and the log only repeats that it failed."""
    echoes = _echoes(choice)
    if not was_built(choice.story, echoes) or _unknown_error(choice.story, echoes):
        return None
    return Verdict(outcome=LogOutcome.ONLY_ECHOES, findings=(echoes_only(echoes, choice.facts), *choice.notes))


def interrupted_by_hand(choice: Choice) -> Verdict | None:
    """Somebody pressed Ctrl-C."""
    failure = choice.origin.failure
    if failure is None or not failure.text.startswith("KeyboardInterrupt"):
        return None
    return _stopped(choice, Line(failure.line, failure.text))


def own_words(choice: Choice) -> Verdict | None:
    """The words of the process that failed first, which no rule knows."""
    failure, origin = choice.origin.failure, choice.origin
    if failure is None or not (failure.native or not better_known(choice.story)):
        return None
    outcome = LogOutcome.RAISED if failure.raised_by_the_script else LogOutcome.UNEXPLAINED
    line = Line(failure.line, failure.text)
    answer = answer_to(failure, choice.facts)
    mends = answer.signature.fix or answer.rule.fix if answer else ""
    linked = links(choice.read, failure.since, f"{failure.text} {failure.condition}", mends)
    more = (*linked, *perhaps_the_end(origin))
    told = unexplained(line, choice.facts, origin, more=more, doing=origin.activity)
    return choice.verdict(outcome, told)


def by_a_signal(choice: Choice) -> Verdict | None:
    """A signal ended the first process, and the log does not say why."""
    ended = choice.origin.ended
    if not ended or not ended.signal or better_known(choice.story):
        return None
    if ended.signal in FROM_OUTSIDE and _signalled(choice.story):
        return None
    rule = choice.causes[0].rule.id if choice.causes else "died-by-signal"
    return choice.verdict(LogOutcome.CAUSE, ended_by_signal(ended, choice.origin, rule=rule))


def stopped_from_outside(choice: Choice) -> Verdict | None:
    """The run was stopped, and no process had ended by itself before."""
    ended, line = choice.origin.ended, _signalled(choice.story) or stopped_at(choice.story)
    if line is None or (ended and ended.line < line.number and ended.signal not in FROM_OUTSIDE):
        return None
    return _stopped(choice, line)


def last_words(choice: Choice) -> Verdict | None:
    """The first process ended, and a line before its end is an error that no rule knows."""
    ended, words = choice.origin.ended, choice.story.timeline.last_words
    if not ended or better_known(choice.story):
        return None
    line = Line(*words) if words else _error_by_form(ended, choice.read)
    if line is None:
        return None
    more = rest_of_block(choice.read, line)
    told = unexplained(line, choice.facts, choice.origin, more=more, doing=choice.origin.activity)
    return choice.verdict(LogOutcome.UNEXPLAINED, told)


def no_words(choice: Choice) -> Verdict | None:
    """The first process ended, and no word of it is in the log."""
    ended = choice.origin.ended
    if not ended or better_known(choice.story):
        return None
    return choice.verdict(LogOutcome.ONLY_ECHOES, ended_without_words(ended, choice.origin))


def worst_line(choice: Choice) -> Verdict | None:
    """A line by which the failure is known."""
    line = _worst_line(choice.story, _echoes(choice))
    told = unexplained(line, choice.facts, choice.origin, more=rest_of_block(choice.read, line))
    return Verdict(outcome=LogOutcome.UNEXPLAINED, findings=(told, *choice.notes))


# A log that shows no failure -> a verdict.
def quiet_failure(choice: Choice) -> Verdict | None:
    """Losses that are no numbers, steps that are skipped, an end in the middle of something."""
    read, timeline = choice.read, choice.story.timeline
    quiet = losses_are_nan(timeline, read.last_line, choice.facts) or steps_are_skipped(timeline)
    quiet = quiet or cut_off(timeline, read.last_line, is_json=read.begins_with_json)
    if quiet is None:
        return None
    outcome = LogOutcome.UNFINISHED if quiet.severity is Severity.WARNING else LogOutcome.CAUSE
    outcome = LogOutcome.UNEXPLAINED if quiet.rule == "log-cut-off" and outcome is LogOutcome.CAUSE else outcome
    return Verdict(outcome=outcome, findings=(quiet, *choice.notes))


def by_evidence(choice: Choice) -> Verdict | None:
    """Nothing is known to have failed: healthy only where something shows it."""
    read, story, notes = choice.read, choice.story, _of_a_well_log(choice)
    health = read.health
    ended = max(health.end, well_until(story))
    shown = max(health.progress, ended, story.until(Event.LOADED))
    handled = read.timeline.tracebacks.handled_lines | _survived_lines(story)
    errors = [line for line in health.errors if line.number > ended and line.number not in handled]
    if errors and shown < errors[0].number and read.last_line - errors[-1].number <= NEAR_THE_END:
        told = unexplained(errors[0], choice.facts, Origin())
        return Verdict(outcome=LogOutcome.UNEXPLAINED, findings=(told, *notes))
    if again := health.of_each_step(read.timeline):
        told = undecided(again[0], times=again[1])
    elif errors:
        told = undecided(errors[0])
    elif health.frame and health.frame.number > ended:
        told = undecided(health.frame, is_frame=True)
    elif not shown and (still := stands_still(read.timeline, read.lines)):
        return Verdict(outcome=LogOutcome.CAUSE, findings=(still, *notes))
    elif not shown or read.errors:
        told = undecided_log(read, choice.facts)
    else:
        return Verdict(outcome=LogOutcome.HEALTHY, findings=notes, activity=ends_within(read.timeline))
    silent = not errors and not again and health.frame is None
    return Verdict(outcome=LogOutcome.UNDECIDED, findings=(told, *notes), silent=silent)


def _survived_lines(story: Story) -> set[int]:
    """The lines of exceptions after which their process went on."""
    left = [one for one in story.timeline.failures if borne(story, one)]
    return {line for one in (*story.timeline.survived, *left) for line in range(one.line, one.line + MESSAGE_LINES)}


FAILED = (
    known_cause,
    broken_at_exit,
    only_echoes,
    interrupted_by_hand,
    own_words,
    by_a_signal,
    stopped_from_outside,
    last_words,
    no_words,
    worst_line,
)

NOT_FAILED = (known_cause, quiet_failure, by_evidence)


def _stopped(choice: Choice, line: Line) -> Verdict:
    """Somebody ended the run; perhaps because it learned nothing any more."""
    nan = losses_are_nan(choice.story.timeline, choice.read.last_line, choice.facts)
    told = interrupted(choice.origin, *line)
    first = (with_activity(nan, choice.origin.activity), told) if nan else (told,)
    return choice.verdict(LogOutcome.CAUSE, *first, placed=False)


def _signalled(story: Story) -> Line | None:
    """Where a launcher says that a signal reached it."""
    failures = story.timeline.failures
    return next((Line(one.line, one.text) for one in failures if "SignalException" in one.text), None)


def _echoes(choice: Choice) -> list[Hit]:
    """The echoes that are of this failure."""
    return [hit for hit in choice.echoes if not is_of_something_before(choice.story, hit)]


def _of_a_well_log(choice: Choice) -> tuple[Finding, ...]:
    """What is told of a log that shows no failure: warnings first; a line that would be a cause is told as only said."""
    facts, hits = choice.facts, choice.beside
    borne = [hit.tier is not Tier.PROBE and not hit.signature.stands for hit in hits]
    notes = [borne_of(hit, facts) if only else _beside(hit, facts) for hit, only in zip(hits, borne, strict=True)]
    return tuple(sorted(notes, key=lambda finding: finding.severity is Severity.NOTE))


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


def has_failed(story: Story, echoes: list[Hit]) -> str:
    """The log shows a failure after which it did not end well."""
    signs = {name: line for name, line in _signs(story, echoes) if name not in story.off}
    certain = max((line for name, line in signs.items() if name != "error-near-the-end"), default=0)
    last = max(certain, signs.get("error-near-the-end", 0))
    return f"line {last} shows a failure" if last > well_until(story, certain) else ""


SIGNS = ("launcher-says-so", "build-says-so", "crashed", "process-ended", "error-near-the-end")
"""By what a failure is known."""


def _signs(story: Story, echoes: list[Hit]) -> Iterator[tuple[str, int]]:
    """The last line of each of them, 0 where there is none."""
    timeline, failed = story.timeline, failed_at(story)
    exited = any(one.line == failed for one in timeline.exits)
    yield SIGNS[0], failed if failed > max(timeline.survived_exit, 0 if exited else timeline.went_on_until) else 0
    yield SIGNS[1], max((hit.line for hit in echoes if hit.tier is Tier.ECHO), default=0)
    yield SIGNS[2], max((one.line for one in timeline.failures if one.native), default=0)
    yield SIGNS[3], max((one.line for one in timeline.exits), default=0)
    error = _last_error(story)
    # why: an error after which the training went on did not end it
    near = error >= timeline.went_on_until and error > story.read.last_line - NEAR_THE_END
    yield SIGNS[4], error if near else 0


def _last_error(story: Story) -> int:
    """The last exception that no process survived, or the last complaint."""
    timeline, complained = story.timeline, story.last(Event.COMPLAINED)
    left = [one.line for one in timeline.failures if not borne(story, one)]
    all_left = len(left) == len(timeline.failures) and not timeline.survived
    last = story.read.last_exception if all_left else max(left, default=0)
    # why: a mere complaint before further steps is none of the end
    # why: an installation that then succeeds went on another way
    until = max(timeline.last_step_line, story.read.health.end - 1)
    over = complained and (complained.number <= until or trained_after(story, complained))
    return max(last, complained.number if complained and not over else 0)


def _beside(hit: Hit, facts: Facts, because: str = "") -> Finding:
    """What is no cause: a note, or a warning where it is true of the result however well the log ended."""
    return finding_of(hit, facts, Severity.WARNING) if hit.signature.stands else note_of(hit, facts, because)


def _promoted(probes: list[Hit], echoes: list[Hit], story: Story) -> list[Hit]:
    """The probe to report as the cause: it is about the op that failed, or nothing says what failed."""
    failed_ops = {hit.op for hit in echoes if hit.op}
    ended = story.origin.ended
    trained = story.timeline.step is not None or bool(ended and ended.signal)
    elsewhere = trained or story.first(Event.COMPILER_ERROR) or _not_an_echo(story.read.exception, echoes)
    about = [hit for hit in probes if hit.op in failed_ops] if failed_ops or elsewhere else probes
    rules = {hit.rule.id for hit in about}
    left = [hit for hit in about if hit.rule.id not in NEVER_ALONE and not rules & set(hit.rule.explained_by)]
    return [_as_cause(hit) for hit in left[:1]]


def _as_cause(probe: Hit) -> Hit:
    """The probe with the rule's own title where its own calls it harmless."""
    title = "" if probe.signature.harmless else probe.signature.title
    return replace(probe, signature=replace(probe.signature, title=title))


def _unknown_error(story: Story, echoes: list[Hit]) -> Line | None:
    """An error in the log that no rule knows, beyond "exit code 1"."""
    line = next(iter(first_hand(story)), None)
    # after a failed compile (an ECHO) an exception only repeats it
    ended_badly = all(hit.tier is Tier.EXIT for hit in echoes)
    return line or (_not_an_echo(story.read.exception, echoes) if ended_badly else None)


def first_failure(read: Scan) -> Line | None:
    """The first line by which a failure is known, without a look at what became of it; None where there is none."""
    marked = (read.exception, *(read.first.get(event) for event in (Event.FAILED, Event.COMPLAINED, Event.GPU_FAULT)))
    known = [line for line in marked if line]
    hits = [hit for hit in read.hits.values() if hit.tier is not Tier.PROBE]
    timeline = read.timeline
    known += [Line(one.line, one.text) for group in (timeline.failures, timeline.exits, hits) for one in group]
    return min(known, default=None, key=lambda line: line.number)


def _worst_line(story: Story, echoes: list[Hit]) -> Line:
    """The line to show for a failure that no rule knows: each kind of line by which it is known to be one."""
    own = _unknown_error(story, echoes) or story.read.exception or story.first(Event.FAILED)
    if line := own or story.first(Event.COMPLAINED) or story.last(Event.SUITE_FAILED):
        return line
    timeline = story.timeline
    secondary = [Line(one.line, one.text) for group in (timeline.failures, timeline.exits, echoes) for one in group]
    return secondary[0]


def _not_an_echo(line: Line | None, echoes: list[Hit]) -> Line | None:
    return line if line and all(hit.line != line.number for hit in echoes) else None


def _causes(causes: tuple[Hit, ...], unexplained: list[Hit], facts: Facts) -> list[Finding]:
    """The cause as an ERROR; its consequences, certain or possible, as NOTEs."""
    first = unexplained[0]
    follow = [first.tier <= Tier.NAMED and hit.tier is Tier.GENERIC and hit is not first for hit in unexplained]
    severities = [Severity.NOTE if follows else Severity.ERROR for follows in follow]
    findings = [finding_of(hit, facts, severity) for hit, severity in zip(unexplained, severities, strict=True)]
    findings += [finding_of(hit, facts, Severity.NOTE) for hit in causes if hit not in unexplained]
    return sorted(findings, key=lambda finding: finding.severity is Severity.NOTE)


def _unexplained(causes: tuple[Hit, ...]) -> list[Hit]:
    """The causes that no other one explains."""
    # why: that another process is gone explains nothing by itself
    named = [hit for hit in causes if not (hit.tier is Tier.GENERIC and LOST.search(hit.text))]
    return [hit for hit in causes if not any(_explains(other, hit) for other in named)] or [*causes]


def _explains(cause: Hit, hit: Hit) -> bool:
    """Whether a problem only follows from another one; from a server's certificate only what the same server did not give."""
    if cause.rule.id not in hit.rule.explained_by or VERSIONS.search(hit.text):
        return False
    return cause.rule.id != CERTIFICATE or cause.line == hit.line or of_one_server(cause.text, hit.text)
