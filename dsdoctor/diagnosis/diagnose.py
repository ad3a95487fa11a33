"""A log -> its Diagnosis: the cause first, then independent problems, then what is harmless."""

import re
from collections.abc import Iterable
from dataclasses import replace

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.redaction import definitions, urls
from dsdoctor.diagnosis.catalogue import contradicted
from dsdoctor.diagnosis.combined import combined_hits
from dsdoctor.diagnosis.failures import LOST
from dsdoctor.diagnosis.findings import of_its_package, partly_searched, reader_failed, unexplained
from dsdoctor.diagnosis.json_lines import JsonLines
from dsdoctor.diagnosis.judgement import Verdict, first_failure, judge
from dsdoctor.diagnosis.models import Diagnosis, Facts, Hit, LogOutcome, LogVerdict, Tier
from dsdoctor.diagnosis.origin import origin_of
from dsdoctor.diagnosis.prefilter import Patterns
from dsdoctor.diagnosis.relations import Origin, Story, survived
from dsdoctor.diagnosis.scan import Scan, scan

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
    known = {hit.line for hit in read.hits.values() if not hit.rule.family}
    read.hits = {number: hit for number, hit in read.hits.items() if not (hit.rule.family and hit.line in known)}
    read.hits = {number: of_its_package(hit, facts) for number, hit in read.hits.items()}
    combined = combined_hits([*read.hits.values()], facts, read)
    found = [*(of_its_package(hit, facts) for hit in combined), *read.hits.values()]
    over = {id(hit) for hit in found if survived(story, hit)}
    hits = sorted(_best_of_each_rule(found, over), key=_rank)
    verdict = judge(hits, facts, replace(story, origin=origin_of(story)))
    findings = _placed(verdict)
    if read.partly.lines:
        # it may be about the cause, unless that was found
        severity = Severity.NOTE if verdict.outcome is LogOutcome.CAUSE else Severity.WARNING
        findings.append(partly_searched(read, severity))
    if read.errors:
        findings.append(reader_failed(read))
    shown = tuple(_with_lines_of_file(_without_secrets(finding), read.records) for finding in findings)
    return Diagnosis(
        name=name,
        lines=read.records.line_of_file(read.lines),
        outcome=verdict.outcome,
        facts=facts,
        findings=shown,
        where=verdict.where,
        activity=verdict.activity,
        follows=verdict.follows,
        silent=verdict.silent,
        without_ranks=_without_ranks(verdict, shown),
    )


def _without_judgement(read: Scan, *, name: str) -> Diagnosis:
    """The verdict by marks alone, where judging the log failed."""
    failed = first_failure(read)
    findings = [*([unexplained(failed, Facts(), Origin())] if failed else []), reader_failed(read)]
    return Diagnosis(
        name=name,
        lines=read.records.line_of_file(read.lines),
        outcome=LogOutcome.UNEXPLAINED if failed else LogOutcome.UNDECIDED,
        facts=Facts(),
        findings=tuple(_with_lines_of_file(_without_secrets(finding), read.records) for finding in findings),
    )


def _placed(verdict: Verdict) -> list[Finding]:
    """The findings, the first one with the ranks on which it began."""
    findings = list(verdict.findings)
    if findings and findings[0].severity is not Severity.NOTE:
        first = findings[0]
        findings[0] = replace(first, title=f"{verdict.where}: {first.title}" if verdict.where else first.title)
    return findings


def _without_ranks(verdict: Verdict, shown: tuple[Finding, ...]) -> str:
    """The title that the first finding had before the ranks were put before it."""
    return _without_secrets(verdict.findings[0]).title if verdict.findings and shown else ""


def _without_secrets(finding: Finding) -> Finding:
    """A finding whose quotations of the log hold no credentials of an address, and no value of a definition."""
    evidence = tuple(urls(definitions(line)) for line in finding.evidence)
    return replace(finding, title=urls(definitions(finding.title)), evidence=evidence)


def _with_lines_of_file(finding: Finding, records: JsonLines) -> Finding:
    """A finding that names the lines as the file counts them, where one line of it held several."""
    if not records.has_several:
        return finding
    evidence = tuple(
        NUMBERED.sub(lambda at: f"{at[1]}{records.line_of_file(int(at[2]))}", line) for line in finding.evidence
    )
    return replace(finding, evidence=evidence)


def _rank(hit: Hit) -> tuple[bool, int, bool, int]:
    """Best first; what is only mentioned last. Of lines that say little, one that another process is gone says least."""
    return hit.aside, hit.tier, hit.tier is Tier.GENERIC and bool(LOST.search(hit.text)), hit.line


def _best_of_each_rule(hits: Iterable[Hit], survived: set[int]) -> list[Hit]:
    """The best hit of every rule, one that was survived only where there is no other. Causes and probes of a rule count
    together, its echoes apart.
    """
    best: dict[tuple[str, bool], Hit] = {}
    for hit in sorted(hits, key=lambda hit: (id(hit) in survived, _rank(hit))):
        best.setdefault((hit.rule.id, hit.tier >= Tier.ECHO), hit)
    return list(best.values())


# The diagnoses of several logs of one run, a log for each rank -> what only follows is told as such.


def together(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Where one log has a failure of its own, the others' closed connections and timeouts are notes."""
    own = [diagnosis for diagnosis in diagnoses if has_error(diagnosis.findings) and not diagnosis.follows]
    if not own:
        return diagnoses
    return [_as_notes(diagnosis) if diagnosis.follows else diagnosis for diagnosis in diagnoses]


def verdict_of(diagnoses: list[Diagnosis], *, one_job: bool = False) -> LogVerdict:
    """The verdict on a run of which these are the logs: each of them has to show that it is well.

    ``one_job``: they are all logs of one job, so those that say nothing of its end are spoken for by those that do.
    """
    speak = [diagnosis for diagnosis in diagnoses if not diagnosis.silent] if one_job else []
    verdicts = {diagnosis.verdict for diagnosis in speak or diagnoses}
    worst_first = (LogVerdict.FAILED, LogVerdict.UNDECIDED, LogVerdict.HEALTHY)
    return next(verdict for verdict in worst_first if verdict in verdicts)


def problem_of(finding: Finding, diagnosis: Diagnosis) -> tuple[str, str]:
    """What makes findings of several logs one problem: the rule, and the title without the rank."""
    first = diagnosis.findings[0]
    return finding.rule, diagnosis.without_ranks or finding.title if finding is first else finding.title


def _as_notes(diagnosis: Diagnosis) -> Diagnosis:
    findings = tuple(replace(finding, severity=Severity.NOTE) for finding in diagnosis.findings)
    return replace(diagnosis, findings=findings)
