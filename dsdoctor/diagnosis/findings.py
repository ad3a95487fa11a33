"""What was found in a log -> findings: titles, evidence with line numbers, fixes. Judges nothing."""

import re
from dataclasses import replace

from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.core.text import counted
from dsdoctor.diagnosis.answers import answer_to
from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.facts import fill, values_of, values_of_step
from dsdoctor.diagnosis.failures import Failure, Frame, refusal_of, refused_evidence
from dsdoctor.diagnosis.lines import last_segment
from dsdoctor.diagnosis.models import Facts, Hit, Line, Rule, Stage
from dsdoctor.diagnosis.relations import Origin
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.rules import book

# A hit in the build of another package than DeepSpeed -> the same hit in words, and with a fix, of that package.


A_BUILD = {Stage.INSTALL, Stage.COMPILE, Stage.LINK}
DEEPSPEEDS_OWN = re.compile(
    r"\b(?:deepspeed|DeepSpeed|op_builder|pre-compil|DS_[A-Z]{2,}|ds_accelerator|Install Ops|fused_adam is)"
)
"""Words that only DeepSpeed's own setup and ops print."""

BUILDS_DEEPSPEED = re.compile(
    r"python -m dsdoctor (?:prebuild|build-wheel|plan)|pip install .{0,80}\bdeepspeed\b|DS_BUILD_"
)
PIPS_OWN = "pip-other-wheel-failed"
BUILT_OTHERWISE = {"apex", "transformer-engine"}
"""Packages that are not installed by their name on PyPI."""
ANOTHER_PACKAGE = "another-package"


def of_its_package(hit: Hit, facts: Facts) -> Hit:
    """The hit, about the package that was being built; as it is where that is DeepSpeed, or not known."""
    project = hit.project if hit.project is not None else facts.project
    if not project or project == "deepspeed" or hit.rule.stage not in A_BUILD or DEEPSPEEDS_OWN.search(hit.text):
        return hit
    told = hit.in_case(ANOTHER_PACKAGE) if any(case.name == ANOTHER_PACKAGE for case in hit.rule.cases) else hit
    signature = replace(
        told.signature,
        title=told.signature.title or hit.rule.title,
        fix=told.signature.fix or hit.rule.fix,
        steps=_its_steps(lines_of(hit), project, hit.rule.id),
    )
    rule = RULES[PIPS_OWN] if hit.rule.id == "deepspeed-setup-bug" else hit.rule
    return replace(hit, rule=rule, signature=signature, groups={**hit.groups, "project": project}, op=None)


def _its_steps(steps: tuple[str, ...], project: str, rule: str) -> tuple[str, ...]:
    """The steps, with those that build DeepSpeed replaced by the one that builds this package."""
    kept = [one for one in steps if not BUILDS_DEEPSPEED.search(one)]
    if len(kept) == len(steps):
        return steps
    if rule == "compiler-oom-killed":
        own = _steps_of(RULES[PIPS_OWN], case="one-compiler")
    elif project in BUILT_OTHERWISE:
        own = _steps_of(RULES[PIPS_OWN], case=project)
    else:
        own = _steps_of(RULES[PIPS_OWN], case="without-isolation")
    before = _steps_of(RULES[PIPS_OWN], case="torch-first") if rule == "torch-missing-at-build" else ()
    return (*before, *kept, *own)


def _steps_of(rule: Rule, *, case: str) -> tuple[str, ...]:
    """The steps of a case of a rule, as the book writes them."""
    return next(one.steps for one in rule.cases if one.name == case) or ()


def lines_of(hit: Hit) -> tuple[str, ...]:
    """The steps of a hit as the book writes them: those of its wording, or of its rule."""
    return hit.rule.steps if hit.signature.steps is None else hit.signature.steps


ERROR = Severity.ERROR
LONGEST, WORDS = 300, 200
GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP) (?:error: )?out of memory|OutOfMemoryError")
LABELS = {
    "python": "Python",
    "torch": "torch",
    "cuda": "torch's CUDA",
    "nvcc": "nvcc",
    "deepspeed": "DeepSpeed",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "zero_stage": "ZeRO stage",
    "experts": "experts",
    "attention": "attention",
    "gcc": "gcc",
    "pip": "pip",
    "cuda_home": "CUDA_HOME",
    "standard": "-std",
    "accelerator": "accelerator",
    "arch_list": "TORCH_CUDA_ARCH_LIST",
    "cache": "cache",
}
ONE_OP_BUILDS = {Stage.COMPILE, Stage.LINK, Stage.JIT, Stage.LOAD}


def finding_of(hit: Hit, facts: Facts, severity: Severity) -> Finding:
    """A cause with its evidence and its fix."""
    values = values_of(hit.groups, facts, hit.op)
    signature, rule = hit.signature, hit.rule
    steps = book.steps_of({"steps": lines_of(hit)})
    ops = (hit.op,) if hit.op and (hit.groups.get("op") or signature.op or rule.stage in ONE_OP_BUILDS) else ()
    return Finding(
        rule=rule.id,
        severity=severity,
        title=fill(signature.title or rule.title, values),
        evidence=(*_where(hit), *_read(facts)),
        affects=ops,
        fix=Fix(
            text=fill(signature.fix or rule.fix, values),
            steps=tuple(step.filled(values_of_step(step.template, values)) for step in steps),
        ),
    )


def _where(hit: Hit) -> tuple[str, ...]:
    others = hit.count - 1
    more = (f"and on {others} more {'line' if others == 1 else 'lines'}",) if others else ()
    return (f"line {hit.line}: {hit.text[:LONGEST]}", *more)


def _read(facts: Facts) -> tuple[str, ...]:
    """What the log says of its machine, in one line."""
    known = [f"{LABELS[name]} {value}" for name, value in vars(facts).items() if name in LABELS and value]
    if facts.architectures:
        known.append(f"built for {', '.join(facts.architectures)}")
    return (f"the log says: {', '.join(known)}",) if known else ()


def note_of(hit: Hit, facts: Facts, because: str = "") -> Finding:
    """A harmless line, or one that is not the cause. ``because``: why not."""
    values = values_of(hit.groups, facts, hit.op)
    why = (f"not the cause: {because}",) if because else ()
    return Finding.note(hit.rule.id, fill(hit.signature.title or hit.rule.title, values), evidence=(*_where(hit), *why))


def not_the_cause(failure: Failure, because: str) -> Finding:
    """An exception that no rule knows, and that did not begin the trouble."""
    evidence = (f"line {failure.line}: {failure.text[:LONGEST]}", f"not the cause: {because}")
    told = book.finding("passed-over", Severity.NOTE, evidence=evidence, words=failure.text[:WORDS])
    return replace(told, fix=None)


def borne_of(hit: Hit, facts: Facts) -> Finding:
    """A line that would be a cause, in a log that shows no failure: what it says is told as said, not as what happened."""
    note = note_of(hit, facts)
    return replace(note, title=book.phrase("diagnosis", "only-mentioned", title=note.title))


def echoes_only(echoes: list[Hit], facts: Facts) -> Finding:
    """The log only repeats that something failed: the finding says so, and how to see the first error."""
    named = [hit for hit in echoes if hit.signature.title]
    ops = [hit.op for hit in echoes if hit.op]
    hit = (named or echoes)[0]
    op = ops[0] if ops else None
    rule = RULES["masked-jit-failure"]
    values = values_of(hit.groups, facts, op)
    project = next((echo.project for echo in echoes if echo.project), facts.project)
    another = project if project and project != "deepspeed" and not op else ""
    title = next(case.title for case in rule.cases if case.name == ANOTHER_PACKAGE) if another else rule.title
    lines = rule.steps
    if another:
        lines = _steps_of(rule, case=ANOTHER_PACKAGE)
    elif op:
        lines = _steps_of(rule, case="one-op")
    values = {**values, "project": another or values.get("project", "")}
    return Finding.error(
        rule.id,
        fill(title, values),
        evidence=(*(f"line {echo.line}: {echo.text[:LONGEST]}" for echo in echoes[:4]), *_read(facts)),
        affects=(op,) if op else (),
        fix=rule.fix,
        steps=book.steps_of({"steps": lines}, values),
    )


def with_activity(finding: Finding, activity: str) -> Finding:
    """A finding whose title does not say what its process was doing, with that as evidence where it is known."""
    return replace(finding, evidence=(*finding.evidence, f"it happened {activity}")) if activity else finding


def unexplained(line: Line, facts: Facts, origin: Origin, *, more: tuple[str, ...] = (), doing: str = "") -> Finding:
    """A failure that no rule knows: the first exception's own words, where it arose, and what would help to explain it.

    ``more``: evidence behind that. ``doing``: what its process did, said there where the title does not name it.
    """
    failure = origin.failure if origin.failure and origin.failure.line == line.number else None
    evidence = (f"line {line.number}: {line.text[:LONGEST]}", *_places(failure), *_read(facts), *more)
    words, activity = line.text[:WORDS], f", {origin.activity}" if failure and origin.activity else ""
    place = failure.frame.place if failure and failure.frame else ""
    if failure and failure.raised_by_the_script:
        at = str(failure.frame)
        return book.finding(
            "script-raised", ERROR, evidence=evidence, words=words, at=at, activity=activity, place=place
        )
    if GPU_MEMORY.search(line.text):
        return with_activity(book.finding("unexplained-failure", ERROR, case="gpu-memory", evidence=evidence), doing)
    if failure and (known := answer_to(failure, facts)):
        return with_activity(replace(finding_of(known, facts, ERROR), evidence=evidence), doing)
    if failure and (refusal := refusal_of(failure)):
        return book.finding(
            "unexplained-failure",
            ERROR,
            case="refused-names" if refusal.names else "refused",
            evidence=(evidence[0], *refused_evidence(refusal), *evidence[1:]),
            package=refusal.package,
            activity=activity,
            place=refusal.place,
            words=words,
            names=refusal.names,
        )
    at = f", at {failure.frame}" if failure and failure.frame else ""
    finding = book.finding(
        "unexplained-failure",
        ERROR,
        case=UNEXPLAINED[_kind(failure)],
        evidence=evidence,
        words=words,
        at=at,
        activity=activity,
        place=place,
        project=failure.last_of_a_project.owner if failure and failure.last_of_a_project else "",
    )
    return finding if failure else with_activity(finding, doing)


UNEXPLAINED = {
    "line": "",
    "thread": "thread-left",
    "native": "native",
    "own": "own-code",
    "package": "package",
    "exception": "no-traceback",
}


def _kind(failure: Failure | None) -> str:
    """What is known of a failure that no rule knows."""
    if failure is None:
        return "line"
    if failure.native:
        return "thread" if "without an active exception" in failure.text else "native"
    if failure.frames:
        raiser = failure.last_of_a_project
        return "own" if raiser and raiser.own else "package"
    return "exception"


def partly_searched(read: Scan, severity: Severity) -> Finding:
    """Lines that were too long, or had words of too many rules, to be searched whole."""
    others = read.partly.lines - 1
    more = (f"and {counted(others, 'more line')}",) if others else ()
    return book.finding(
        "line-partly-searched", severity, evidence=more, line=read.records.line_of_file(read.partly.first)
    )


def reader_failed(read: Scan) -> Finding:
    """dsdoctor itself could not read a part of the log; the rest of the verdict is that of the others."""
    lines = [read.records.line_of_file(one.line) for one in read.errors if one.line]
    return book.finding(
        "reader-failed",
        Severity.WARNING,
        case="" if lines else "whole",
        evidence=tuple(f"{f'line {one.line}: ' if one.line else ''}{one.error}" for one in read.errors[:4]),
        line=lines[0] if lines else None,
        more=f" and {len(lines) - 1} more" if len(lines) > 1 else "",
    )


def _places(failure: Failure | None) -> tuple[str, ...]:
    """The innermost place in the user's own files, and where in a package it ended."""
    if not failure or not failure.frames:
        return ()
    last = failure.frames[-1]
    inner = (f"raised in {last}",) if last != failure.frame else ()
    mine = failure.frame
    if failure.text.strip(": ") == "AssertionError" and last.source.startswith("assert "):
        inner = (*inner, f"it asserts {last.source.removeprefix('assert ')[:160]}")
    return (f"your code stood at {mine}" if mine and mine.own else f"{_whose(mine or last)} at {mine or last}", *inner)


def _whose(frame: Frame) -> str:
    return f"in {frame.owner}," if frame.owner else "it stood"


def undecided_log(read: Scan, facts: Facts) -> Finding:
    """The log shows no failure, and nothing that would show that all went well."""
    last = next((raw for raw in reversed(read.timeline.recent) if raw.strip()), b"")
    evidence = (f"line {read.last_line}: {last_segment(last)[:LONGEST]}", *_read(facts))
    return book.finding("log-undecided", Severity.WARNING, evidence=evidence)


def undecided_after(error: Line) -> Finding:
    """A line is an error, and too little after it shows whether the run went on."""
    return book.finding("log-undecided", Severity.WARNING, case="error", evidence=(_line(error),))


def undecided_frame(frame: Line) -> Finding:
    """A piece of a traceback: neither what was raised nor what became of it is in the log."""
    return book.finding("log-undecided", Severity.WARNING, case="traceback", evidence=(_line(frame),))


def _line(line: Line) -> str:
    return f"line {line.number}: {line.text[:LONGEST]}"


def empty(lines: int) -> Finding:
    """The log holds nothing but blank lines."""
    return book.finding("empty-log", Severity.WARNING, lines=counted(lines, "line"))
