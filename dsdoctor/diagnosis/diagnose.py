"""A log -> its Diagnosis: the cause first, then independent problems, then what is harmless."""

from collections.abc import Iterable
from dataclasses import replace

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.harmless_flags import definitions
from dsdoctor.core.redaction import urls
from dsdoctor.diagnosis.catalogue.regressions import contradicted
from dsdoctor.diagnosis.combined import combined_hits
from dsdoctor.diagnosis.findings import echoes_only, empty, finding_of, note_of, unexplained
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Diagnosis, Facts, Hit, LogOutcome, Tier
from dsdoctor.diagnosis.scan import Line, Scan, scan

NEAR_THE_END = 60
"""An exception or an error so close to the end, in lines, is what ended the log."""

WAITING = {"nccl-collective-timeout", "nccl-network-interface"}
"""Rules of what the other ranks print when a rank has ended."""


def diagnose(lines: Iterable[bytes | str], *, name: str = "") -> Diagnosis:
    """Read a log once and say what went wrong first. Never raises, whatever the log holds.

    >>> log = ["[rank1]: ninja: build stopped: subcommand failed.", "x.h:6:10: fatal error: cusparse.h: No such file or directory"]
    >>> [finding.rule for finding in diagnose(log).findings]
    ['cuda-header-missing']
    """
    read = scan(lines)
    facts = read.fact_reader.facts()
    read.hits = {number: hit for number, hit in read.hits.items() if not contradicted(hit, facts)}
    hits = sorted(
        _best_of_each_rule([*combined_hits([*read.hits.values()], facts, read), *read.hits.values()]), key=_rank
    )
    outcome, findings = _judge(hits, facts, read)
    shown = tuple(_without_secrets(finding) for finding in findings)
    return Diagnosis(name=name, lines=read.lines, outcome=outcome, facts=facts, findings=shown)


def _without_secrets(finding: Finding) -> Finding:
    """A finding whose quotations of the log hold no credentials of an address, and no value of a definition."""
    evidence = tuple(urls(definitions(line)) for line in finding.evidence)
    return replace(finding, title=urls(definitions(finding.title)), evidence=evidence)


def _rank(hit: Hit) -> tuple[int, int]:
    return hit.tier, hit.line


def _best_of_each_rule(hits: Iterable[Hit]) -> list[Hit]:
    """The best hit of every rule. Causes and probes of a rule count together, its echoes apart."""
    best: dict[tuple[str, bool], Hit] = {}
    for hit in hits:
        key = hit.rule.id, hit.tier >= Tier.ECHO
        if key not in best or _rank(hit) < _rank(best[key]):
            best[key] = hit
    return list(best.values())


def _judge(hits: list[Hit], facts: Facts, read: Scan) -> tuple[LogOutcome, list[Finding]]:
    causes = [hit for hit in hits if hit.tier <= Tier.GENERIC]
    probes = [hit for hit in hits if hit.tier is Tier.PROBE]
    echoes = sorted((hit for hit in read.hits.values() if hit.tier >= Tier.ECHO), key=lambda hit: hit.line)
    if not read.last_line:
        return LogOutcome.EMPTY, [empty(read.lines)]
    failed = _failed(read, echoes)
    if failed and Event.GPU_FAULT in read.first:
        waiting = [hit for hit in causes if hit.tier is Tier.GENERIC and hit.rule.id in WAITING]
        causes, probes = [hit for hit in causes if hit not in waiting], [*probes, *waiting]
    elif not causes and failed:
        causes = _promoted(probes, echoes, read)
    rules = {hit.rule.id for hit in causes}
    notes = [note_of(hit, facts) for hit in probes if hit.rule.id not in rules]
    recovered = [hit for hit in causes if _recovered(hit, read)]
    causes = [hit for hit in causes if hit not in recovered]
    notes += [note_of(hit, facts) for hit in recovered]
    if causes:
        return LogOutcome.CAUSE, [*_causes(causes, facts), *notes]
    if failed and echoes and not _unknown_error(read, echoes):
        return LogOutcome.ONLY_ECHOES, [echoes_only(echoes, facts), *notes]
    if failed:
        return LogOutcome.UNEXPLAINED, [unexplained(_worst_line(read, echoes), facts), *notes]
    return LogOutcome.HEALTHY, notes


def _failed(read: Scan, echoes: list[Hit]) -> bool:
    """Whether the log shows a failure after which it did not end well."""
    well = read.last.get(Event.ENDED_WELL)
    failed = read.last.get(Event.FAILED)
    ended = well.number if well else 0
    complained = read.last.get(Event.COMPLAINED)
    error_line = max(read.last_exception, complained.number if complained else 0)
    repeated = max((hit.line for hit in echoes if hit.tier is Tier.ECHO), default=0)
    near_the_end = error_line if error_line > read.last_line - NEAR_THE_END else 0
    return max(failed.number if failed else 0, near_the_end, repeated) > ended


def _recovered(hit: Hit, read: Scan) -> bool:
    """Whether the log ended well after this line, and nothing failed after that."""
    well = read.last.get(Event.ENDED_WELL)
    if not well or hit.rule.id == "op-silently-skipped":
        return False
    failed = read.last.get(Event.FAILED)
    return well.number > max(hit.line, failed.number if failed else 0, read.last_exception)


def _promoted(probes: list[Hit], echoes: list[Hit], read: Scan) -> list[Hit]:
    """The probe to report as the cause: it is about the op that failed, or nothing says what failed."""
    failed_ops = {hit.op for hit in echoes if hit.op}
    explained_elsewhere = Event.COMPILER_ERROR in read.first or _not_an_echo(read.exception, echoes)
    about = [hit for hit in probes if hit.op in failed_ops] if failed_ops or explained_elsewhere else probes
    rules = {hit.rule.id for hit in about}
    standing = [hit for hit in about if hit.rule.id != "op-silently-skipped" and not rules & set(hit.rule.explained_by)]
    return [_as_cause(hit) for hit in standing[:1]]


def _as_cause(probe: Hit) -> Hit:
    """The probe with the rule's own title where its own calls it harmless."""
    title = "" if "harmless" in probe.signature.title else probe.signature.title
    return replace(probe, signature=replace(probe.signature, title=title))


def _unknown_error(read: Scan, echoes: list[Hit]) -> Line | None:
    """An error in the log that no rule knows, beyond "exit code 1"."""
    line = read.first.get(Event.GPU_FAULT) or read.first.get(Event.COMPILER_ERROR)
    # after a failed compile (an ECHO) an exception only repeats it
    ended_badly = all(hit.tier is Tier.EXIT for hit in echoes)
    return line or (_not_an_echo(read.exception, echoes) if ended_badly else None)


def _worst_line(read: Scan, echoes: list[Hit]) -> Line:
    """The line to show for a failure that no rule knows."""
    own = _unknown_error(read, echoes) or read.exception or read.first.get(Event.FAILED)
    return own or read.first[Event.COMPLAINED]


def _not_an_echo(line: Line | None, echoes: list[Hit]) -> Line | None:
    return line if line and all(hit.line != line.number for hit in echoes) else None


def _causes(causes: list[Hit], facts: Facts) -> list[Finding]:
    """The cause as an ERROR; its consequences, certain or possible, as NOTEs."""
    rules = {hit.rule.id for hit in causes}
    explained = [hit for hit in causes if rules & set(hit.rule.explained_by)]
    standing = [hit for hit in causes if hit not in explained] or causes
    first, rest = standing[0], standing[1:]
    sure = first.tier <= Tier.NAMED
    findings = [finding_of(first, facts, Severity.ERROR)]
    for hit in rest:
        findings.append(finding_of(hit, facts, Severity.NOTE if sure and hit.tier is Tier.GENERIC else Severity.ERROR))
    findings += [finding_of(hit, facts, Severity.NOTE) for hit in explained if hit not in standing]
    return sorted(findings, key=lambda finding: finding.severity is Severity.NOTE)
