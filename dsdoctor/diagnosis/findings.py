"""What was found in a log -> findings: titles, evidence with line numbers, fixes. Judges nothing."""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace

from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.core.text import counted
from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.lines import Line, last_segment
from dsdoctor.diagnosis.models import Facts, Hit, Rule, Stage, Tier
from dsdoctor.diagnosis.owner import PYTHON
from dsdoctor.diagnosis.relations import Origin
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import Exit, Failure, Frame, signal_name
from dsdoctor.rules import book
from dsdoctor.rules.store import forms

ANOTHER_PACKAGE = "another-package"


def steps_of_case(rule: Rule, *, case: str) -> tuple[str, ...]:
    """The steps of a case of a rule, as the book writes them."""
    return next(one.steps for one in rule.cases if one.name == case) or ()


def book_steps(hit: Hit) -> tuple[str, ...]:
    """The steps of a hit as the book writes them: those of its wording, or of its rule."""
    return hit.rule.steps if hit.signature.steps is None else hit.signature.steps


ERROR = Severity.ERROR

MAX_LINE_LENGTH, MAX_WORDS_LENGTH = 300, 200

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
    steps = book.steps_of({"steps": book_steps(hit)})
    ops = (hit.op,) if hit.op and (hit.groups.get("op") or signature.op or rule.stage in ONE_OP_BUILDS) else ()
    return Finding(
        rule=rule.id,
        severity=severity,
        title=fill(signature.title or rule.title, values),
        evidence=(*_where(hit), *_environment_line(facts)),
        affects=ops,
        fix=Fix(
            text=fill(signature.fix or rule.fix, values),
            steps=tuple(step.filled(values_of_step(step.template, values)) for step in steps),
        ),
    )


def _where(hit: Hit) -> tuple[str, ...]:
    others = hit.count - 1
    more = (f"and on {others} more {'line' if others == 1 else 'lines'}",) if others else ()
    return (f"line {hit.line}: {hit.text[:MAX_LINE_LENGTH]}", *more)


def _environment_line(facts: Facts) -> tuple[str, ...]:
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
    evidence = (f"line {failure.line}: {failure.text[:MAX_LINE_LENGTH]}", f"not the cause: {because}")
    told = book.finding("passed-over", Severity.NOTE, evidence=evidence, words=failure.text[:MAX_WORDS_LENGTH])
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
        lines = steps_of_case(rule, case=ANOTHER_PACKAGE)
    elif op:
        lines = steps_of_case(rule, case="one-op")
    values = {**values, "project": another or values.get("project", "")}
    return Finding.error(
        rule.id,
        fill(title, values),
        evidence=(
            *(f"line {echo.line}: {echo.text[:MAX_LINE_LENGTH]}" for echo in echoes[:4]),
            *_environment_line(facts),
        ),
        affects=(op,) if op else (),
        fix=rule.fix,
        steps=book.steps_of({"steps": lines}, values),
    )


def with_activity(finding: Finding, activity: str) -> Finding:
    """A finding whose title does not say what its process was doing, with that as evidence where it is known."""
    return replace(finding, evidence=(*finding.evidence, f"it happened {activity}")) if activity else finding


def with_place(finding: Finding, hit: Hit, failure: Failure | None) -> Finding:
    """The cause, with the place in the user's own files where it arose, where the hit has not named it."""
    frame = failure.frame if failure else None
    if frame is None or not frame.own or any(frame.place in value for value in hit.groups.values()):
        return finding
    return replace(finding, evidence=(*finding.evidence, f"your code stood at {frame}"))


def with_what_came_before(finding: Finding, hit: Hit, origin: Origin, *, mine: bool) -> Finding:
    """The cause, with an exception before it that no rule knows: where nothing says whose lines they are, it may be the cause.

    ``mine``: the hit is a part of the failure that began it.
    """
    failure = origin.failure
    if mine:
        return replace(finding, evidence=(*finding.evidence, *perhaps_the_end(origin)))
    if failure is None or not failure.frames or failure.line >= hit.line:
        return finding
    if failure.speaker.number is not None or hit.tier <= Tier.FILE:
        return finding
    at = f", at {failure.frame}" if failure.frame else ""
    told = f"before it, line {failure.line}: {failure.text[:160]}{at}; if that ended its process, it is the cause"
    return replace(finding, evidence=(*finding.evidence, told))


def unexplained(line: Line, facts: Facts, origin: Origin, *, more: tuple[str, ...] = (), doing: str = "") -> Finding:
    """A failure that no rule knows: the first exception's own words, where it arose, and what would help to explain it.

    ``more``: evidence behind that. ``doing``: what its process did, said there where the title does not name it.
    """
    failure = origin.failure if origin.failure and origin.failure.line == line.number else None
    noticed = failure.notice if failure else None
    evidence = (
        f"line {line.number}: {line.text[:MAX_LINE_LENGTH]}",
        *((f"before it, line {noticed.number}: {noticed.text[:MAX_LINE_LENGTH]}",) if noticed else ()),
        *_places_of(failure),
        *_environment_line(facts),
        *more,
    )
    words, activity = line.text[:MAX_WORDS_LENGTH], f", {origin.activity}" if failure and origin.activity else ""
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
        raised=failure.last_of_a_project.place if failure and failure.last_of_a_project else "",
        called=failure.giver.place if failure and failure.giver else "",
    )
    return finding if failure else with_activity(finding, doing)


UNEXPLAINED = {
    "line": "",
    "thread": "thread-left",
    "native": "native",
    "own": "own-code",
    "package": "package",
    "stopped": "stopped",
    "exception": "no-traceback",
}


def _kind(failure: Failure | None) -> str:
    """What is known of a failure that no rule knows."""
    if failure is None:
        return "line"
    if failure.native:
        return "thread" if "without an active exception" in failure.text else "native"
    if not failure.frames:
        return "exception"
    raiser = failure.last_of_a_project
    if raiser and raiser.own:
        return "own"
    return "stopped" if failure.on_purpose else "package"


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


def _places_of(failure: Failure | None) -> tuple[str, ...]:
    """The innermost place in the user's own files, and where in a package it ended."""
    if not failure or not failure.frames:
        return ()
    last = failure.frames[-1]
    inner = (f"raised in {last}",) if last != failure.frame else ()
    mine = failure.frame
    if failure.condition:
        inner = (*inner, f"it asserts {failure.condition}")
    return (f"your code stood at {mine}" if mine and mine.own else f"{_whose(mine or last)} at {mine or last}", *inner)


def _whose(frame: Frame) -> str:
    return f"in {frame.owner}," if frame.owner else "it stood"


def undecided_log(read: Scan, facts: Facts) -> Finding:
    """The log shows no failure, and nothing that would show that all went well."""
    last = next((raw for raw in reversed(read.timeline.recent) if raw.strip()), b"")
    evidence = (f"line {read.last_line}: {last_segment(last)[:MAX_LINE_LENGTH]}", *_environment_line(facts))
    return book.finding("log-undecided", Severity.WARNING, evidence=evidence)


def undecided_after(error: Line) -> Finding:
    """A line is an error, and too little after it shows whether the run went on."""
    return book.finding("log-undecided", Severity.WARNING, case="error", evidence=(_line(error),))


def undecided_again(error: Line, times: int) -> Finding:
    """The training goes on, and the same error comes in every step of it."""
    words = error.text[:MAX_WORDS_LENGTH]
    return book.finding(
        "log-undecided", Severity.WARNING, case="again", evidence=(_line(error),), words=words, times=times
    )


def undecided_frame(frame: Line) -> Finding:
    """A piece of a traceback: neither what was raised nor what became of it is in the log."""
    return book.finding("log-undecided", Severity.WARNING, case="traceback", evidence=(_line(frame),))


def _line(line: Line) -> str:
    return f"line {line.number}: {line.text[:MAX_LINE_LENGTH]}"


def empty(lines: int) -> Finding:
    """The log holds nothing but blank lines."""
    return book.finding("empty-log", Severity.WARNING, lines=counted(lines, "line"))


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
        evidence=(*_evidence_of_exit(ended), *perhaps_the_end(origin)),
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
        evidence=(f"its last words: {words[:200]}", *_evidence_of_exit(ended)),
        name=ended.name,
        number=ended.signal,
    )


def ended_without_words(ended: Exit, origin: Origin) -> Finding:
    """A process ended with an exit code, and no word of it is in the log."""
    return book.finding(
        "ended-without-words",
        Severity.ERROR,
        case="passed-over" if origin.passed_over else "",
        evidence=(*_evidence_of_exit(ended), *perhaps_the_end(origin)),
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


def _evidence_of_exit(ended: Exit) -> tuple[str, ...]:
    when = f" (pid {ended.pid} on {ended.host}, {ended.time})" if ended.time and ended.host else ""
    root = (f"torchrun names it as the root cause, the first process that failed{when}",) if ended.root else ()
    file = (f"its traceback is in {ended.error_file}",) if ended.error_file else ()
    return (f"line {ended.line}: {ended.text}", *root, *file)


# An exception that no other rule knows -> the general answer to its kind, or to what it states. Never a cause.
GENERAL = tuple(rule for rule in RULES.values() if rule.general)


def answer_to(failure: Failure, facts: Facts) -> Hit | None:
    """The first general rule with a wording for an exception of this owner; None where its kind says nothing by itself.

    >>> hit = answer_to(Failure(line=9, text="KeyError: 'images'"), Facts())
    >>> hit.rule.id, hit.groups["name"]
    ('key-missing', 'images')
    """
    places = _values_of_places(failure, facts)
    for rule in GENERAL:
        if hit := _general_hit(rule, failure, places):
            return hit
    return None


def _general_hit(rule: Rule, failure: Failure, places: dict[str, str]) -> Hit | None:
    for signature in rule.signatures:
        if signature.owner == "project" and "project" not in places:
            continue
        found = re.search(signature.pattern, failure.text)
        if found and not (signature.unless and re.search(signature.unless, failure.text)):
            groups = {name: value.strip()[:160] for name, value in found.groupdict().items() if value}
            return Hit(
                rule=rule,
                signature=signature,
                line=failure.line,
                text=failure.text,
                groups={**places, **groups},
                speaker=failure.speaker,
            )
    return None


def _values_of_places(failure: Failure, facts: Facts) -> dict[str, str]:
    """``project``: who raised it, with its ``version`` where the log has it; ``caller``: the nearest code of somebody else above,
    and ``called`` its line.

    ``raised``: the line of the one who raised it, ``condition`` what it asserts. ``words``: the exception's own. ``place`` and
    ``at``: the innermost line of the user's own code, else of the project that raised it; ``yours``: only the former.
    """
    raiser = failure.last_of_a_project
    words = re.sub(r"(?<!\.)\.$", "", failure.text[:MAX_WORDS_LENGTH])  # a full stop, and no ellipsis
    if raiser is None:
        return {"words": words}
    caller = failure.giver
    known = getattr(facts, raiser.owner.lower(), None)
    places = {
        "words": words,
        "at": f", at {failure.frame}" if failure.frame else "",
        "project": raiser.owner if raiser.owner != PYTHON else "",
        "version": f" {known}" if isinstance(known, str) else "",
        "caller": (caller.owner or "your code") if caller else "",
        "called": caller.place if caller else "",
        "condition": failure.condition,
        "raised": raiser.place,
        "place": failure.frame.place if failure.frame else "",
        "yours": failure.frame.place if failure.frame and failure.frame.own else "",
    }
    return {name: value for name, value in places.items() if value}


# A template of the catalogue and what was read -> a sentence, and the values for a step.
FIELD = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")

PACKAGES = forms("packages")
KNOWN_PACKAGES = {*PACKAGES["known"], *PACKAGES["modules"].values()}

INSTALLS = re.compile(r"\bpip (?:install|download)\b")

PACKAGE_FIELDS = frozenset({"package", "program", "wanted"})

HOST_FIELDS = {"host": "HOST", "ip": "NODE"}

PATH_FIELDS = frozenset({"path", "file", "script", "program", "error", "checkpoint_folder", "cache", "cache_aside"})

NUMBER_FIELDS = frozenset({"pid", "port", "other_port", "python", "newest"})

PATH_FORM = re.compile(r"(?!-)(?!\w+://)[\w./~+@%=,: -]+")
"""Letters, digits and what stands in the names of files; no character that a shell or a glob takes for something else."""

NUMBER_FORM = re.compile(r"\d{1,10}(?:\.\d{1,6}){0,3}", re.ASCII)

NAME_FORM = re.compile(r"(?!-)[\w./:+\[\],<>=!~;@-]+", re.ASCII)
"""A package with its versions, an address of an index, an architecture, an op: one word."""

RUN_BY_STEP = re.compile(r"(?:\bpython|\bchmod \+x) \{(?P<name>\w+)")
"""A file that a command runs, or makes one that can be run: a log chooses none."""

MAX_VALUE_LENGTH = 160

LAST_PORT = 65535


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill ``{name}`` or ``{name|text without it}``; ``{name_hint}`` is " (value)", or nothing.

    >>> fill("nvcc is CUDA {nvcc|another}, torch {torch}{arch_hint}", {"torch": "2.1.0", "arch": "sm_90"})
    'nvcc is CUDA another, torch 2.1.0 (sm_90)'
    """
    return FIELD.sub(lambda found: _field(found, values), template)


def placeholders(template: str) -> dict[str, str]:
    """A name in capitals for each field of a template that has no text of its own without a log.

    >>> placeholders("build {op} for {arch|all}{cuda_hint}")
    {'op': 'OP'}
    """
    fields = (found for found in FIELD.finditer(template) if found[2] is None and not found[1].endswith("_hint"))
    return {found[1]: found[1].upper() for found in fields}


def values_of(groups: Mapping[str, str], facts: Facts, op: str | None) -> dict[str, str]:
    """What templates may name: the facts, then what the line itself says, then names derived from them."""
    values = {name: value for name, value in vars(facts).items() if isinstance(value, str)}
    if op:
        values["op"] = op
    values |= {name: value[:MAX_VALUE_LENGTH] for name, value in groups.items()}
    if "torch_extensions" not in values.get("cache", "") or ".." in values["cache"]:
        values.pop("cache", None)  # the fix moves this folder, so it must be the right one
    if cache := values.get("cache"):
        values["cache_aside"] = f"{cache.rstrip('/')}.old"
    if cuda := values.get("cuda"):
        values["cuda_dashed"] = cuda.replace(".", "-")
        values["cuda_tag"] = f"cu{cuda.replace('.', '')}"
    values |= _torch_again(values.get("torch", ""), values.get("cuda_tag"))
    if module := values.get("module"):
        values["package"] = known_package(module.split(".")[0]) or "PACKAGE"
    if path := values.get("path"):
        values["checkpoint_folder"] = posixpath.dirname(path) if posixpath.basename(path) == "latest" else path
    if (port := values.get("port", "")).isdigit():
        values["other_port"] = str(int(port) + 1 if int(port) < LAST_PORT else int(port) - 1)
    if launcher := values.get("launcher"):
        values["launcher_package"] = PACKAGES["launchers"].get(launcher, "openmpi-bin")
    return values


def known_package(name: str) -> str | None:
    """The package that an index has under this name, or that brings this module; None for one that is anybody's to take.

    >>> known_package("yaml"), known_package("huggingface_hub"), known_package("my_company_internal")
    ('pyyaml', 'huggingface-hub', None)
    """
    package = PACKAGES["modules"].get(name, name.replace("_", "-").lower())
    return package if package in KNOWN_PACKAGES else None


def values_of_step(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """What a command may take of a log: no host, nothing that it would run or make runnable, of packages to install or download
    those that are known, and of all else what has the form of a path, a number or a name.

    >>> values_of_step("pip install {wanted}", {"wanted": "evil>=1", "host": "h", "ip": "10.0.0.1"})
    {'wanted': 'PACKAGE', 'host': 'HOST', 'ip': 'NODE'}
    >>> values_of_step("ls -l {path}", {"path": "/data/a b"}), values_of_step("ls -l {path|MODEL}", {"path": "/a;id"})
    ({'path': '/data/a b'}, {})
    """
    taken = {name: value for name, value in values.items() if _form_of(name).fullmatch(value) and value.isprintable()}
    taken |= {name: without for name, without in HOST_FIELDS.items() if name in values}
    for found in RUN_BY_STEP.finditer(template):
        taken.pop(found["name"], None)
    if INSTALLS.search(template):
        for field in PACKAGE_FIELDS & set(values):
            named = re.match(r"[\w.-]*\w", values[field])
            if field not in taken or named is None or known_package(named[0]) is None:
                taken[field] = "PACKAGE"
    return taken


def _form_of(name: str) -> re.Pattern[str]:
    return NUMBER_FORM if name in NUMBER_FIELDS else PATH_FORM if name in PATH_FIELDS else NAME_FORM


def _torch_again(torch: str, tag: str | None) -> dict[str, str]:
    """The torch of the log as a requirement, with the index that has it; nothing where the log does not say.

    >>> _torch_again("2.8.0+cu128", None)
    {'torch_requirement': 'torch==2.8.0', 'torch_index': 'https://download.pytorch.org/whl/cu128'}
    """
    release, _, local = torch.partition("+")
    if not release or not (local or tag):
        return {}
    return {"torch_requirement": f"torch=={release}", "torch_index": f"https://download.pytorch.org/whl/{local or tag}"}


def _field(found: re.Match[str], values: Mapping[str, str]) -> str:
    name, fallback = found[1], found[2]
    if name.endswith("_hint"):
        value = values.get(name.removesuffix("_hint"))
        return f" ({value})" if value else ""
    known = values.get(name)
    if known is None:
        return fallback if fallback is not None else "(unknown)"
    return known
