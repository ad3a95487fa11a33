"""What was found in a log -> findings: titles, evidence with line numbers, fixes. Judges nothing."""

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.core.text import counted
from dsdoctor.diagnosis.catalogue import RULES, Rule, Stage, Tier
from dsdoctor.diagnosis.lines import Line, last_segment
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.owner import PYTHON
from dsdoctor.diagnosis.relations import Origin
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import FINITE, FRAME, STEP, Exit, Failure, Frame, signal_name
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
        title=book.fill(signature.title or rule.title, values),
        evidence=(*_where(hit), *_environment_line(facts)),
        affects=ops,
        fix=Fix(
            text=book.fill(signature.fix or rule.fix, values),
            steps=tuple(step.filled(values_of_step(step.template, values)) for step in steps),
        ),
    )


def _where(hit: Hit) -> tuple[str, ...]:
    others = hit.count - 1
    more = (f"and on {others} more {'line' if others == 1 else 'lines'}",) if others else ()
    return (f"line {hit.line}: {hit.text[:MAX_LINE_LENGTH]}", *more)


def _environment_line(facts: Facts) -> tuple[str, ...]:
    """What the log says of its machine, in one line."""
    labels = forms("facts")["labels"]
    known = [f"{labels[name]} {value}" for name, value in vars(facts).items() if name in labels and value]
    if facts.architectures:
        known.append(f"built for {', '.join(facts.architectures)}")
    return (f"the log says: {', '.join(known)}",) if known else ()


def note_of(hit: Hit, facts: Facts, because: str = "") -> Finding:
    """A harmless line, or one that is not the cause. ``because``: why not."""
    values = values_of(hit.groups, facts, hit.op)
    why = (f"not the cause: {because}",) if because else ()
    return Finding.note(
        hit.rule.id, book.fill(hit.signature.title or hit.rule.title, values), evidence=(*_where(hit), *why)
    )


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
        book.fill(title, values),
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
    return replace(finding, evidence=(*finding.evidence, f"in your code: {frame}"))


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


def rest_of_block(read: Scan, line: Line) -> tuple[str, ...]:
    """The reason that a tool gives below a line that begins with a cross, as uv and pip do: up to an empty line, or its help."""
    texts: list[str] = []
    for raw in islice(read.timeline.recent, max(0, len(read.timeline.recent) - read.lines + line.number), None):
        text = last_segment(raw).lstrip(BLOCK)
        if not text or text.startswith(("help:", "hint:", "note:")) or not line.text.startswith("×"):
            break
        texts.append(text)
    return (f"its reason: {' '.join(texts)[:MAX_LINE_LENGTH]}",) if texts else ()


BLOCK = "╰─▶>│ "
"""What stands before the lines of such a reason."""

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
    return (f"in your code: {mine}" if mine and mine.own else f"{_whose(mine or last)} at {mine or last}", *inner)


def _whose(frame: Frame) -> str:
    return f"in {frame.owner}," if frame.owner else "it stood"


def undecided_log(read: Scan, facts: Facts) -> Finding:
    """The log shows no failure, and nothing that would show that all went well."""
    last = next((raw for raw in reversed(read.timeline.recent) if raw.strip()), b"")
    evidence = (f"line {read.last_line}: {last_segment(last)[:MAX_LINE_LENGTH]}", *_environment_line(facts))
    return book.finding("log-undecided", Severity.WARNING, evidence=evidence)


def undecided(line: Line, *, times: int | None = None, is_frame: bool = False) -> Finding:
    """A line shows trouble, and too little after it shows what became of it: an error, one that came so many ``times``, or a place
    of a traceback.
    """
    return book.finding(
        "log-undecided",
        Severity.WARNING,
        case="again" if times else "traceback" if is_frame else "error",
        evidence=(f"line {line.number}: {line.text[:MAX_LINE_LENGTH]}",),
        words=line.text[:MAX_WORDS_LENGTH] if times else "",
        times=times,
    )


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


# What was read -> the values of the templates of the book, in sentences and in commands.
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


def values_of(groups: Mapping[str, str], facts: Facts, op: str | None) -> dict[str, str]:
    """What templates may name: the facts, then what the line itself says, then names derived from them; each also as a hint.

    >>> values_of({"arch": "sm_90"}, Facts(), None)
    {'arch': 'sm_90', 'arch_hint': ' (sm_90)'}
    """
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
    return values | {f"{name}_hint": f" ({value})" for name, value in values.items()}


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


# The names in an error, and in what mends it -> the lines above it in the same log that set them: the command, a configuration, a
# variable, or a warning that named them before. Evidence only: nothing is decided by it. A name counts if it has the form of a
# setting, so that words of a sentence lead nowhere.
MAX_LINKS = 3
MAX_LINE = 20_000  # so many bytes of a command or a printed configuration are looked at

NAME = re.compile(r"--?[A-Za-z]\w*(?:[-.]\w+)+|--[A-Za-z]\w{3,60}|(?<![\w/])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+")
"""A name that has the form of an option, a setting or a variable: ``--tensor-parallel-size``, ``MASTER_PORT``."""

OPTION = re.compile(
    r"(?:^|[\s'\"])--(?P<name>[A-Za-z][\w.-]{1,90})(?:['\"], ['\"]|[ =]{1,2}['\"]?)(?P<value>(?!-)[^\s,;'\"`)}\]]{1,80})"
)

ASSIGNED = re.compile(
    r"(?:^|[\s'\"{(,;|+])(?P<name>[A-Za-z][\w.-]{2,90})['\"]?(?:=['\"]?|: (?=\d|True|False|true|false|None|null|['\"/~]))"
    r"(?P<value>['\"]?[\w./^+@%-][^\s,;'\"`)}\]]{0,80})"
)

MEASURED = re.compile(r"(?:^|_)(?:loss|reward|norm|mean|acc|time)(?:_|$)")
"""Parts of names of what a training measures; with a figure it is no setting."""

QUOTES = "'\""
A_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b[Ww]arning:|UserWarning")
SECRET = re.compile(r"(?i)key|token|secret|passw|auth")
OF_EVERY_RANK = "local_rank"  # launchers print it for each process


def links(read: Scan, before: int, words: str, mends: str = "") -> tuple[str, ...]:
    """The evidence. ``before``: the line of the error; ``words``: its own; ``mends``: those of its fix."""
    named, asked, sentence = names_in(words), names_in(mends), f" {' '.join(re.findall(r'[a-z0-9_]+', words.lower()))} "
    found: dict[str, str] = {}
    warned = ""
    for line in _lines_above(read, before):
        of_line = [*OPTION.finditer(line.text), *ASSIGNED.finditer(line.text)]
        for one in of_line:
            key = _plain(one["name"])
            if key in found or key == OF_EVERY_RANK or SECRET.search(key) or MEASURED.search(key):
                continue
            if key in named or key in asked or _is_phrase(key, sentence):
                found[key] = f"set above, in line {line.number}: {one['name']}={one['value'].strip(QUOTES)}"
        if not of_line and not warned and A_WARNING.search(line.text) and named & names_in(line.text):
            warned = f"warned of above, in line {line.number}: {line.text[:300]}"
    told = sorted(found, key=lambda key: key not in named)[:MAX_LINKS]
    return (*(found[key] for key in told), *((warned,) if warned else ()))


def names_in(text: str) -> set[str]:
    """The names of settings in a text, written alike.

    >>> sorted(names_in("--tensor-parallel-size must divide num_heads (28); set MASTER_PORT, not the port"))
    ['master_port', 'num_heads', 'tensor_parallel_size']
    """
    return {_plain(found) for found in NAME.findall(text)} - {OF_EVERY_RANK}


def _plain(name: str) -> str:
    """A name without its dashes and the sections that it is in."""
    return name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()


def _is_phrase(key: str, sentence: str) -> bool:
    """Whether the words of a name stand one after the other in a sentence: "tensor parallel size" is tensor_parallel_size."""
    parts = [part for part in key.split("_") if part not in {"num", "n", "the"}]
    return len(parts) > 1 and f" {' '.join(parts)} " in sentence


def _lines_above(read: Scan, before: int) -> Iterator[Line]:
    """The first lines of a log and those just above its error, without steps, source and frames."""
    recent, last = read.timeline.recent, read.lines
    first_recent = last - len(recent) + 1
    raws = [(number, raw) for number, raw in enumerate(read.timeline.head, 1) if number < first_recent]
    raws += enumerate(recent, first_recent)
    source = 0  # the line of source below a frame
    for number, raw in raws:
        if number >= before:
            return
        raw = raw[:MAX_LINE]
        if b"=" not in raw and b":" not in raw and b"--" not in raw:
            continue
        if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]):
            continue
        text = last_segment(raw)
        if FRAME.match(text):
            source = number + 1
        elif number != source:
            yield Line(number, text)
