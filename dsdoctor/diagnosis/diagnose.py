"""A log -> its Diagnosis: the cause first, then what is independent of it, then what is harmless."""

from collections.abc import Iterable
from dataclasses import asdict, replace

from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.nouns import Diagnosis, Facts, Hit, Outcome, Stage, Tier
from dsdoctor.diagnosis.rules import RULES
from dsdoctor.diagnosis.say import command, say, values_of
from dsdoctor.diagnosis.scan import Scan, scan
from dsdoctor.diagnosis.stories import told
from dsdoctor.finding import Finding, Fix, Severity

LONGEST = 300
NEAR_THE_END = 60
"""An exception so close to the end, in lines, is what ended the log."""

LABELS = {
    "python": "Python",
    "torch": "torch",
    "cuda": "torch's CUDA",
    "nvcc": "nvcc",
    "deepspeed": "DeepSpeed",
    "gcc": "gcc",
    "pip": "pip",
    "cuda_home": "CUDA_HOME",
    "standard": "-std",
    "accelerator": "accelerator",
    "arch_list": "TORCH_CUDA_ARCH_LIST",
    "cache": "cache",
}
ONE_OP_BUILDS = {Stage.COMPILE, Stage.LINK, Stage.JIT, Stage.LOAD}


def diagnose(lines: Iterable[bytes | str], *, name: str = "") -> Diagnosis:
    """Read a log once and say what went wrong first. Never raises for what stands in it.

    >>> log = ["[rank1]: ninja: build stopped: subcommand failed.", "x.h:6:10: fatal error: cusparse.h: No such file or directory"]
    >>> [finding.rule for finding in diagnose(log).findings]
    ['cuda-header-missing']
    """
    read = scan(lines)
    facts = read.gathering.facts()
    hits = sorted(_one_a_rule([*told([*read.hits.values()], facts, read), *read.hits.values()]), key=_rank)
    outcome, findings = _judge(hits, facts, read)
    return Diagnosis(name=name, lines=read.lines, outcome=outcome, facts=facts, findings=tuple(findings))


def _rank(hit: Hit) -> tuple[int, int]:
    return hit.tier, hit.line


def _one_a_rule(hits: Iterable[Hit]) -> list[Hit]:
    """The best hit of every rule; a probe and a cause of one rule are one."""
    best: dict[tuple[str, bool], Hit] = {}
    for hit in hits:
        key = hit.rule.id, hit.tier >= Tier.ECHO
        if key not in best or _rank(hit) < _rank(best[key]):
            best[key] = hit
    return list(best.values())


def _judge(hits: list[Hit], facts: Facts, read: Scan) -> tuple[Outcome, list[Finding]]:
    causes = [hit for hit in hits if hit.tier <= Tier.GENERIC]
    probes = [hit for hit in hits if hit.tier is Tier.PROBE]
    echoes = sorted((hit for hit in read.hits.values() if hit.tier >= Tier.ECHO), key=lambda hit: hit.line)
    if not read.last_line:
        return Outcome.EMPTY, [_empty(read)]
    failed = _failed(read, echoes)
    if not causes and failed:
        causes = _promoted(probes, echoes, read)
    rules = {hit.rule.id for hit in causes}
    notes = [_note(hit, facts) for hit in probes if hit.rule.id not in rules]
    overcome = [hit for hit in causes if _overcome(hit, read)]
    causes = [hit for hit in causes if hit not in overcome]
    notes += [_note(hit, facts) for hit in overcome]
    if causes:
        return Outcome.CAUSE, [*_causes(causes, facts), *notes]
    if failed and echoes and not _says_more(read, echoes):
        return Outcome.ONLY_ECHOES, [_echo(echoes, facts), *notes]
    if failed:
        return Outcome.UNEXPLAINED, [_unexplained(read, facts), *notes]
    return Outcome.HEALTHY, notes


def _failed(read: Scan, echoes: list[Hit]) -> bool:
    """Whether the log shows a failure that nothing overcame."""
    well = read.last.get(Event.ENDED_WELL)
    failed = read.last.get(Event.FAILED)
    ended = well.number if well else 0
    exception = read.last_exception if read.last_exception > read.last_line - NEAR_THE_END else 0
    repeated = max((hit.line for hit in echoes if hit.tier is Tier.ECHO), default=0)
    return max(failed.number if failed else 0, exception, repeated) > ended


def _overcome(hit: Hit, read: Scan) -> bool:
    """Whether the log ended well after this line, and nothing failed after that."""
    well = read.last.get(Event.ENDED_WELL)
    if not well or hit.rule.id == "op-silently-skipped":
        return False
    failed = read.last.get(Event.FAILED)
    return well.number > max(hit.line, failed.number if failed else 0, read.last_exception)


def _promoted(probes: list[Hit], echoes: list[Hit], read: Scan) -> list[Hit]:
    """Probes explain a failure when they are about the op that failed, or when nothing says what failed."""
    failed_ops = {hit.op for hit in echoes if hit.op}
    said = read.exception and not any(hit.line == read.exception.number for hit in echoes)
    about = [hit for hit in probes if hit.op in failed_ops] if failed_ops or said else probes
    rules = {hit.rule.id for hit in about}
    standing = [hit for hit in about if hit.rule.id != "op-silently-skipped" and not rules & set(hit.rule.explained_by)]
    return [_as_cause(hit) for hit in standing[:1]]


def _as_cause(probe: Hit) -> Hit:
    """The rule's own title: the probe's says that it is harmless."""
    title = "" if "harmless" in probe.signature.title else probe.signature.title
    return replace(probe, signature=replace(probe.signature, title=title))


def _says_more(read: Scan, echoes: list[Hit]) -> bool:
    """An exception that is no echo tells more than "exit code 1"."""
    ended_badly = all(hit.tier is Tier.EXIT for hit in echoes)
    return ended_badly and read.exception is not None and all(hit.line != read.exception.number for hit in echoes)


def _causes(causes: list[Hit], facts: Facts) -> list[Finding]:
    """The cause is an ERROR; what follows from it, or may follow from it, is a NOTE."""
    rules = {hit.rule.id for hit in causes}
    explained = [hit for hit in causes if rules & set(hit.rule.explained_by)]
    standing = [hit for hit in causes if hit not in explained] or causes
    first, rest = standing[0], standing[1:]
    sure = first.tier <= Tier.NAMED
    findings = [_finding(first, facts, Severity.ERROR)]
    for hit in rest:
        findings.append(_finding(hit, facts, Severity.NOTE if sure and hit.tier is Tier.GENERIC else Severity.ERROR))
    findings += [_finding(hit, facts, Severity.NOTE) for hit in explained if hit not in standing]
    return sorted(findings, key=lambda finding: finding.severity is Severity.NOTE)


def _finding(hit: Hit, facts: Facts, severity: Severity) -> Finding:
    values = values_of(hit.groups, facts, hit.op)
    signature, rule = hit.signature, hit.rule
    commands = signature.commands or rule.commands
    ops = (hit.op,) if hit.op and (hit.groups.get("op") or signature.op or rule.stage in ONE_OP_BUILDS) else ()
    return Finding(
        rule=rule.id,
        severity=severity,
        title=say(signature.title or rule.title, values),
        evidence=(*_where(hit), *_read(facts)),
        affects=ops,
        fix=Fix(
            text=say(signature.fix or rule.fix, values), commands=tuple(command(text, values) for text in commands)
        ),
    )


def _where(hit: Hit) -> tuple[str, ...]:
    others = hit.count - 1
    more = (f"and on {others} more {'line' if others == 1 else 'lines'}",) if others else ()
    return (f"line {hit.line}: {hit.text[:LONGEST]}", *more)


def _read(facts: Facts) -> tuple[str, ...]:
    """What the log says of its machine, in one line."""
    known = [f"{LABELS[name]} {value}" for name, value in asdict(facts).items() if name in LABELS and value]
    if facts.architectures:
        known.append(f"built for {', '.join(facts.architectures)}")
    return (f"the log says: {', '.join(known)}",) if known else ()


def _note(hit: Hit, facts: Facts) -> Finding:
    """A harmless line, or one that was overcome."""
    values = values_of(hit.groups, facts, hit.op)
    return Finding(
        rule=hit.rule.id,
        severity=Severity.NOTE,
        title=say(hit.signature.title or hit.rule.title, values),
        evidence=_where(hit),
    )


def _echo(echoes: list[Hit], facts: Facts) -> Finding:
    """There is not enough in this log: say so, and how to see the first error."""
    named = [hit for hit in echoes if hit.signature.title]
    ops = [hit.op for hit in echoes if hit.op]
    hit = (named or echoes)[0]
    op = ops[0] if ops else None
    rule = RULES["masked-jit-failure"]
    values = values_of(hit.groups, facts, op)
    return Finding(
        rule=rule.id,
        severity=Severity.ERROR,
        title=say(rule.title, values),
        evidence=tuple(f"line {echo.line}: {echo.text[:LONGEST]}" for echo in echoes[:4]) + _read(facts),
        affects=(op,) if op else (),
        fix=Fix(text=rule.fix, commands=_first_error_commands(op)),
    )


def _first_error_commands(op: str | None) -> tuple[str, ...]:
    """How to see the compiler's own words: one op by itself at run time, or an installation with all it says."""
    again = "python -m dsdoctor diagnose build.log"
    if op:
        script = f"from deepspeed.ops.op_builder.all_ops import ALL_OPS; ALL_OPS['{op}'].load()"
        return (f'TORCH_EXTENSIONS_DIR="$(mktemp -d)" MAX_JOBS=1 python -c "{script}" 2>&1 | tee build.log', again)
    install = "MAX_JOBS=1 python -m pip install -v --no-cache-dir --no-build-isolation deepspeed"
    return (f"{install} 2>&1 | tee build.log", again)


def _unexplained(read: Scan, facts: Facts) -> Finding:
    """A failure that no rule knows: show the first line that looks like an error."""
    line = read.exception or read.first[Event.FAILED]
    return Finding(
        rule="unexplained-failure",
        severity=Severity.ERROR,
        title="the log shows a failure that no rule of dsdoctor knows",
        evidence=(f"line {line.number}: {line.text[:LONGEST]}", *_read(facts)),
        fix=Fix(
            text="read the log from this line on; what the machine itself looks like may tell more",
            commands=("python -m dsdoctor check", "python -m dsdoctor look"),
        ),
    )


def _empty(read: Scan) -> Finding:
    return Finding(
        rule="empty-log",
        severity=Severity.WARNING,
        title=f"there is nothing in this log ({read.lines} lines, all blank)",
        fix=Fix(
            text="give the output of the whole command, stderr too; a process that prints nothing and hangs "
            "often waits for a lock in "
            "~/.cache/torch_extensions",
            commands=("COMMAND 2>&1 | tee build.log", "python -m dsdoctor diagnose build.log"),
        ),
    )
