"""The hall of the diagnosing commands: joins probe, checks and builder. Acts through them, shows nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.architectures import KNOWN, numeric
from dsdoctor.builder.choices import choose_jobs
from dsdoctor.builder.deep import ask_compiler
from dsdoctor.builder.nouns import Source, Wish
from dsdoctor.builder.op_choice import wanted_ops
from dsdoctor.builder.op_facts import describe, describe_installed
from dsdoctor.builder.op_table import OpVerdict, judge_ops, without_needs
from dsdoctor.builder.source import lay_out
from dsdoctor.builder.workspace import cache_folder, private_folder, workspace
from dsdoctor.checks import Examined, examine
from dsdoctor.errors import DoctorError, UsageError
from dsdoctor.finding import Finding, Fix, Severity
from dsdoctor.host import LocalHost
from dsdoctor.machine import Machine
from dsdoctor.probe import probe

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user wants examined. ``deep`` asks the compiler too; ``rules`` empty means every check."""

    python: str
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
    """Look at this machine and judge it; with ``deep`` ask the compiler. Raises UsageError for an unknown op or rule."""
    host = LocalHost()
    cache = cache_folder(host)
    machine = probe(host, python=question.python, cache=str(cache), whole=question.deep)
    topics = examine(machine, rules=question.rules)
    if question.rules:
        return _without_table(machine, topics, None)
    if not question.source and machine.deepspeed and not question.deep:
        return _judged(machine, topics, _installed(host, machine, question), question, str(cache), {})
    try:
        private_folder(cache)
        with workspace(cache) as folder:
            source = _source(host, machine, question, cache, folder / "source", say)
            compiled = _ask(host, machine, source, question, folder, say) if question.deep else {}
            return _judged(machine, topics, source, question, str(cache), compiled)
    except UsageError:
        raise
    except DoctorError as error:
        if question.source or question.deep:
            raise
        return _without_table(machine, topics, error)


def accelerator_at_hand(machine: Machine, wish: Wish) -> str:
    """Whose ops are judged: asked for, set in the shell, else those of this torch (without one: of these GPUs)."""
    shell = machine.variables.get("DS_ACCELERATOR")
    named = wish.accelerator or (shell if shell in {"cuda", "cpu"} else None)
    cuda = machine.torch.cuda is not None if machine.torch else bool(machine.gpus)
    return named or ("cuda" if cuda else "cpu")


def _judged(
    machine: Machine,
    topics: tuple[Examined, ...],
    source: Source,
    question: Question,
    cache: str,
    compiled: dict[str, str | None],
) -> Checked:
    findings = tuple(finding for topic in topics for finding in topic.findings)
    table = judge_ops(machine, source, question.wish, findings, cache=cache, compiled=compiled)
    told = iter(table.findings)
    weighed = tuple(replace(topic, findings=tuple(next(told) for _ in topic.findings)) for topic in topics)
    refused = tuple(told)
    if refused:
        weighed += (Examined(topic="ops", summary="Ops", findings=refused),)
    return Checked(machine=machine, topics=weighed, ops=table.ops, source=source)


def _without_table(machine: Machine, topics: tuple[Examined, ...], error: DoctorError | None) -> Checked:
    """The findings alone; where the ops should have been judged and could not, that is a note."""
    plain = tuple(replace(topic, findings=without_needs(topic.findings)) for topic in topics)
    if error is not None:
        fix = Fix(text=error.hint or "name a DeepSpeed", commands=("python -m dsdoctor check --source 0.19.8",))
        title = f"the ops were not judged: {error.message}"
        note = Finding(rule="ops-not-judged", severity=Severity.NOTE, title=title, fix=fix)
        plain += (Examined(topic="ops", summary="Ops", findings=(note,)),)
    return Checked(machine=machine, topics=plain, ops=(), source=None)


def _architectures(machine: Machine) -> tuple[str, ...]:
    return numeric(tuple(dict.fromkeys((*KNOWN, *(machine.torch.known_architectures if machine.torch else ())))))


def _installed(host: LocalHost, machine: Machine, question: Question) -> Source:
    assert machine.deepspeed is not None
    assert machine.python is not None
    return describe_installed(
        host,
        machine.deepspeed,
        accelerator=accelerator_at_hand(machine, question.wish),
        python=machine.python.executable,
        torch=machine.torch.location if machine.torch else "",
        architectures=_architectures(machine),
    )


def _source(host: LocalHost, machine: Machine, question: Question, cache: Path, folder: Path, say: Say) -> Source:
    """The DeepSpeed at hand: named, else installed, else the newest that was fetched before, else the newest."""
    if machine.python is None:
        raise DoctorError(
            "no Python answers, so nothing can be asked of a DeepSpeed", hint="name one with --python PATH"
        )
    if not question.source and machine.deepspeed:
        return _installed(host, machine, question)
    python = machine.python.executable
    spec, offline = question.source or "newest", question.wish.offline
    try:
        laid = lay_out(host, spec, folder, cache=cache, python=python, offline=offline or not question.source)
    except UsageError:
        if question.source or offline:
            raise
        say("fetching the newest DeepSpeed's source, to know its ops")
        laid = lay_out(host, spec, folder, cache=cache, python=python, offline=False)
    return describe(
        host,
        replace(laid, because="--source" if question.source else "the newest; none is installed here"),
        accelerator=accelerator_at_hand(machine, question.wish),
        python=python,
        torch=machine.torch.location if machine.torch else "",
        architectures=_architectures(machine),
    )


def _ask(
    host: LocalHost, machine: Machine, source: Source, question: Question, folder: Path, say: Say
) -> dict[str, str | None]:
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
    return ask_compiler(host, source, names, python=python, jobs=jobs, folder=folder, on_op=on_op)
