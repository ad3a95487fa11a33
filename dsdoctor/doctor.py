"""The hall of the diagnosing commands: joins probe, checks and builder. Acts through them, shows nothing."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.builder.choices import choose_jobs
from dsdoctor.builder.deep import ask_compiler
from dsdoctor.builder.nouns import Source, Wish
from dsdoctor.builder.op_choice import wanted_ops
from dsdoctor.builder.op_table import OpVerdict, judge_ops, without_needs
from dsdoctor.builder.workspace import cache_folder, private_folder, workspace
from dsdoctor.checks import Examined, examine
from dsdoctor.errors import DoctorError, UsageError
from dsdoctor.finding import Finding, Fix, Severity
from dsdoctor.host import LocalHost
from dsdoctor.machine import Machine
from dsdoctor.probe import Probing
from dsdoctor.sight import Say, Sight, see, source_at_hand


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user wants examined: this machine, or the snapshot ``machine``. ``deep`` asks the compiler too; ``rules`` empty
    means every check."""

    python: str
    machine: Path | None = None
    source: str | None = None
    rules: frozenset[str] = frozenset()
    deep: bool = False
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The outcome: the machine, each topic with its findings, the op table and whose ops they are."""

    machine: Machine
    topics: tuple[Examined, ...]
    ops: tuple[OpVerdict, ...]
    source: Source | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, in the order of the topics."""
        return tuple(finding for topic in self.topics for finding in topic.findings)


def check(question: Question, *, say: Say) -> Checked:
    """Look at a machine and judge it; with ``deep`` ask the compiler. Raises UsageError for an unknown op or rule."""
    if question.deep:
        return _deep(question, say)
    sight, source = _looked(question, say)
    topics = examine(sight.machine, rules=question.rules)
    if isinstance(source, Source):
        return _judged(sight, topics, source, question, {})
    if source is not None and (question.source or question.wish.ops):
        # an op or a source that was named and is none is the user's; else the findings stand without the table
        raise source
    return _without_table(sight.machine, topics, source)


def _looked(question: Question, say: Say) -> tuple[Sight, Source | DoctorError | None]:
    """The machine, and the ops, an error instead of them, or None where only some checks were asked for."""
    if question.machine:
        sight = see(question.python, question.machine, whole=True)
        return sight, _source(sight, question, say)
    host = LocalHost()
    cache = str(cache_folder(host))
    with Probing(host, python=question.python, cache=cache, whole=False) as probing:
        # the ops are asked while torch is being loaded
        source = _source(Sight(machine=probing.early(), cache=cache), question, say)
        return Sight(machine=probing.final(), cache=cache), source


def _source(sight: Sight, question: Question, say: Say) -> Source | DoctorError | None:
    try:
        return None if question.rules else source_at_hand(sight, question.source, question.wish, say=say)
    except DoctorError as error:
        return error


def _deep(question: Question, say: Say) -> Checked:
    if question.machine:
        raise UsageError("--deep asks the compiler, and a snapshot has none", hint="run it on that machine")
    sight = see(question.python, None, whole=True)
    topics = examine(sight.machine, rules=question.rules)
    with workspace(private_folder(cache_folder(LocalHost()))) as folder:
        source = source_at_hand(sight, question.source, question.wish, say=say, folder=folder)
        compiled = _ask(sight.machine, source, question, folder, say)
        return _judged(sight, topics, source, question, compiled)


def _judged(
    sight: Sight,
    topics: tuple[Examined, ...],
    source: Source,
    question: Question,
    compiled: dict[str, str | None],
) -> Checked:
    findings = tuple(finding for topic in topics for finding in topic.findings)
    machine = sight.machine
    table = judge_ops(machine, source, question.wish, findings, cache=sight.cache, compiled=compiled)
    told = iter(table.findings)
    weighed = tuple(replace(topic, findings=tuple(next(told) for _ in topic.findings)) for topic in topics)
    refused = tuple(told)
    if refused:
        weighed += (Examined(topic="ops", summary="Ops", findings=refused),)
    return Checked(machine=machine, topics=weighed, ops=table.ops, source=source)


def _without_table(machine: Machine, topics: tuple[Examined, ...], error: DoctorError | None) -> Checked:
    """The findings alone; where the ops should have been judged and could not, that is a finding."""
    plain = tuple(replace(topic, findings=without_needs(topic.findings)) for topic in topics)
    if error is not None:
        fix = Fix(text=error.hint or "name a DeepSpeed", commands=("python -m dsdoctor check --source 0.19.8",))
        title = f"the ops were not judged: {error.message}"
        unjudged = Finding(rule="ops-not-judged", severity=Severity.WARNING, title=title, fix=fix)
        plain += (Examined(topic="ops", summary="Ops", findings=(unjudged,)),)
    return Checked(machine=machine, topics=plain, ops=(), source=None)


def _ask(machine: Machine, source: Source, question: Question, folder: Path, say: Say) -> dict[str, str | None]:
    if machine.torch is None or machine.torch.broken or machine.python is None or not machine.compilers:
        return {}
    facts = wanted_ops(source, question.wish).ops if question.wish.ops else source.ops
    names = tuple(fact.op for fact in facts if fact.sources)
    jobs, _ = choose_jobs(machine, question.wish, device_code=True)
    done: list[str] = []

    def on_op(op: str, error: str | None) -> None:
        done.append(op)
        say(f"[{len(done)}/{len(names)}] {op}: {error or 'compiles as far as the preprocessor, and links'}")

    python = machine.python.executable
    return ask_compiler(LocalHost(), source, names, python=python, jobs=jobs, folder=folder, on_op=on_op)
