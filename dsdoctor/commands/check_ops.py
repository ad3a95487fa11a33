"""What was observed of a machine and found by the checks -> findings weighed by the op table. Asks the compiler for --deep."""

from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.make.preprocess import ask_compiler
from dsdoctor.builder.plan.choices import choose_jobs
from dsdoctor.builder.plan.op_table import OpVerdict, judge_ops, without_needs
from dsdoctor.builder.plan.ops import wanted_ops
from dsdoctor.checks import Examined
from dsdoctor.commands.offers import offers_for
from dsdoctor.core.build_models import Source
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.probe.observe import Observation, Say


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


def weighed(
    observation: Observation,
    topics: tuple[Examined, ...],
    source: Source,
    request: BuildRequest,
    compiled: dict[str, str | None],
) -> Checked:
    """The topics with their findings weighed by the op table, and the table; ``compiled`` is the compiler's answer for each op."""
    findings = tuple(finding for topic in topics for finding in topic.findings)
    machine = observation.machine
    offers = offers_for(observation, request)
    table = judge_ops(machine, source, request, findings, cache=observation.cache, compiled=compiled, offers=offers)
    findings_left = iter(table.findings)
    topics_weighed = tuple(
        replace(topic, findings=tuple(next(findings_left) for _ in topic.findings)) for topic in topics
    )
    refused = tuple(findings_left)
    if refused:
        topics_weighed += (Examined(topic="ops", summary="Ops", findings=refused),)
    return Checked(machine=machine, topics=topics_weighed, ops=table.ops, source=source)


def without_table(machine: Machine, topics: tuple[Examined, ...], error: DoctorError | None) -> Checked:
    """The findings alone; where the ops should have been judged and could not, that is a finding."""
    plain = tuple(replace(topic, findings=without_needs(topic.findings)) for topic in topics)
    if error is not None:
        title = f"the ops were not judged: {error.message}"
        unjudged = Finding.warning("ops-not-judged", title, fix=error.hint or "name a DeepSpeed with --source")
        plain += (Examined(topic="ops", summary="Ops", findings=(unjudged,)),)
    return Checked(machine=machine, topics=plain, ops=(), source=None)


def asked_of_compiler(
    machine: Machine, source: Source, request: BuildRequest, folder: Path, say: Say
) -> dict[str, str | None]:
    """The compiler's answer for each op: an error, or None where it compiles."""
    if machine.torch is None or machine.torch.broken or machine.python is None or not machine.compilers:
        return {}
    facts = wanted_ops(source, request).ops if request.ops else source.ops
    names = tuple(fact.op for fact in facts if fact.sources)
    jobs, _, _ = choose_jobs(machine, request, device_code=True)
    done: list[str] = []

    def on_op(op: str, error: str | None) -> None:
        done.append(op)
        say(f"[{len(done)}/{len(names)}] {op}: {error or 'compiles as far as the preprocessor, and links'}")

    python = machine.python.executable
    return ask_compiler(LocalHost(), source, names, python=python, jobs=jobs, folder=folder, on_op=on_op)
