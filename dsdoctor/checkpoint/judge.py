"""A folder -> everything that the quick look says of it: the tag, its findings, and the verdict for the planned run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.conditions import judge_conditions
from dsdoctor.checkpoint.contents import Facts
from dsdoctor.checkpoint.evaluation import evaluates, outcome_of_load
from dsdoctor.checkpoint.examine import PARTITIONED, Examined, another_training, examine, without_optimizer
from dsdoctor.checkpoint.frozen import judge_universal_load, left_by_universal
from dsdoctor.checkpoint.look import Folder, folder_of_tags_below, read_tag
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.plan import ALL, LOAD_UNIVERSAL, NO_OPTIMIZER, PROVEN_WITH, Outcome, Plan, Verdict
from dsdoctor.checkpoint.tags import choose, judge_denied, judge_latest, judge_newer, newer_tags
from dsdoctor.checkpoint.weights_alone import judge_weights_alone
from dsdoctor.core.finding import Finding, has_error, step

STAGES = {None: "an unknown stage", 0: "no ZeRO"}
GIB = 1 << 30


Values = Callable[[Examined], Iterable[Finding]]


def no_values(examined: Examined) -> Iterable[Finding]:  # noqa: ARG001
    """The quick look: the tensors are not read."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """``examined``: the tag that was judged, None for a folder without one. ``outcome``: of the planned run, None where the
    tag is not whole. ``rank_bytes``: what each rank at least reads into the host's memory at once. ``values_read``: whether the
    tensors were read too."""

    folder: Folder
    examined: Examined | None
    findings: tuple[Finding, ...]
    outcome: Outcome | None = None
    rank_bytes: int = 0
    values_read: bool = False


def judge(
    folder: Folder,
    tag: str | None,
    plan: Plan,
    *,
    available: int | None = None,
    ranks_here: int | None = None,
    values: Values = no_values,
) -> Judged:
    """Judge a folder. ``available``: bytes of memory that this machine has to spare for ``ranks_here`` ranks.

    ``values``: what else is to be judged of the tag, where the quick look is not all.
    """
    chosen = choose(folder, tag)
    about_latest = tuple(judge_latest(folder, chosen=tag is not None))
    if chosen is None:
        return Judged(folder=folder, examined=None, findings=(no_tags(folder),))
    examined = examine(folder, read_tag(chosen), chosen=tag is not None)
    alone = plan.load != ALL or evaluates(examined.facts, plan)
    if alone and (examined.facts.stage or 0) < PARTITIONED:
        examined = without_optimizer(examined)
    about_tag = (*judge_tag(examined), *values(examined))
    findings = [*about_latest, *about_tag]
    for newer in newer_tags(folder, chosen) if tag is None else ():
        later = examine(folder, read_tag(newer))
        errors = tuple(each for each in judge_tag(later) if has_error((each,)))
        findings.append(judge_newer(newer, errors, chosen, another_training(examined, later)))
    findings += judge_denied(folder, chosen) if tag is None else ()
    if has_error(about_tag):
        return Judged(folder=folder, examined=examined, findings=tuple(findings))
    conditions = judge_conditions(examined)
    decided = _decided(examined, plan, conditions)
    findings += conditions
    needed = bytes_of_rank(examined)
    if plan.load != ALL and not evaluates(examined.facts, plan) and decided.verdict is Verdict.LOADS:
        findings += judge_weights_alone(examined, plan)
    if decided.verdict is Verdict.LOADS:
        findings += judge_universal_load(examined)
    if not (conditions and decided.why == conditions[0].title):  # that finding says it already, and what decides it
        findings += _about(decided, examined, plan)
    findings += _memory(needed, ranks_here, available)
    return Judged(folder=folder, examined=examined, findings=tuple(findings), outcome=decided, rank_bytes=needed)


def _decided(examined: Examined, plan: Plan, conditions: Sequence[Finding]) -> Outcome:
    """Whether it loads as planned; not known where a file or a condition of it is not."""
    decided = outcome_of_load(examined.facts, plan)
    if decided.verdict is not Verdict.LOADS:
        return decided
    if any(file.unknown for file in examined.tag.files):
        return Outcome(verdict=Verdict.UNKNOWN, why="not all of its files could be judged")
    return Outcome(verdict=Verdict.UNKNOWN, why=conditions[0].title) if conditions else decided


def no_tags(folder: Folder) -> Finding:
    """A folder in which no tag is."""
    says = f"latest names {folder.latest!r}" if folder.latest is not None else "and there is no file latest"
    inner = tuple(str(path) for path in folder_of_tags_below(folder.path))
    fix = "name the folder that save_checkpoint was given, the one around global_step..."
    if folder.beside and not inner:
        fix = "weights alone resume no training: load them into the model (from_pretrained, load_state_dict) and begin anew"
    return Finding.error(
        "checkpoint-no-tags",
        f"{folder.path} holds no checkpoint of DeepSpeed: no folder in it has files like mp_rank_00_model_states.pt",
        evidence=(
            says,
            *(f"weights only: {name}" for name in folder.beside[:4]),
            *(f"you may not read {name}, which was not looked at" for name in folder.denied[:4]),
        ),
        fix=fix,
        steps=tuple(step("python -m dsdoctor checkpoint {folder}", folder=path) for path in inner[-1:]),
    )


def bytes_of_rank(examined: Examined) -> int:
    """What a rank reads at once: its model states, and then its optimizer states; the larger of both."""
    sizes = [0]
    for part in (Part.MODEL, Part.OPTIMIZER):
        sizes.append(max((shard.file.size for shard in examined.tag.of(part)), default=0))
    return max(sizes)


def _about(decided: Outcome, examined: Examined, plan: Plan) -> Iterator[Finding]:
    tag, facts = examined.tag.folder, examined.facts
    evidence = [
        *([f"DeepSpeed says: {decided.words}"] if decided.words else []),
        *_weights_alone(decided, facts, plan),
        *([_proof(facts)] if decided.verdict is not Verdict.UNKNOWN else []),
    ]
    if decided.verdict is Verdict.CANNOT:
        yield Finding.error(
            "checkpoint-cannot-load",
            f"{tag.name} cannot be loaded in this run: {decided.why}",
            evidence=evidence,
            fix=decided.fix
            or "train on with the settings that it was saved with, or begin anew from its weights alone",
            steps=()
            if decided.fix
            else (step("python -m dsdoctor checkpoint {folder} --merge OUT", folder=str(tag.path)),),
        )
    elif decided.verdict is Verdict.UNKNOWN:
        yield Finding.note(
            "checkpoint-load-not-known",
            f"whether {tag.name} loads in this run is not known: {decided.why}",
            evidence=evidence,
            fix=decided.fix or "one short run with these settings and load_checkpoint decides it",
        )
    elif decided.verdict is Verdict.UNIVERSAL:
        yield _needs_universal(decided, examined, evidence)


def _weights_alone(decided: Outcome, facts: Facts, plan: Plan) -> Iterator[str]:
    """What can be had where the whole of it is not loaded."""
    alone = outcome_of_load(facts, replace(plan, load=NO_OPTIMIZER))
    if (
        plan.load == ALL
        and not decided.fix
        and decided.verdict in {Verdict.CANNOT, Verdict.UNIVERSAL}
        and alone.verdict is Verdict.LOADS
    ):
        yield "load_checkpoint(..., load_optimizer_states=False) loads its weights, and the optimizer begins anew"


def _needs_universal(decided: Outcome, examined: Examined, evidence: list[str]) -> Finding:
    tag = examined.tag.folder
    there = examined.folder.tag(f"{tag.name}_universal")
    convert = step(
        "python -m dsdoctor checkpoint {folder} --tag {tag} --universal {out}",
        note="DeepSpeed's own converter, checked before and after",
        folder=str(examined.folder.path),
        tag=tag.name,
        out=f"{tag.path}_universal",
    )
    ready_step = step(
        "python -m dsdoctor checkpoint {folder} --tag {tag}",
        folder=str(examined.folder.path),
        tag=f"{tag.name}_universal",
    )
    if left := left_by_universal(examined):
        evidence = [*evidence, f"a universal load leaves {left} as the model was made"]
    ready = f"{there.name} is here already" if there and there.universal else "convert it"
    return Finding.error(
        "checkpoint-needs-universal",
        f"{tag.name} does not load as it is: {decided.why}",
        evidence=evidence,
        fix=f"{ready}, and put {LOAD_UNIVERSAL} into the configuration of the run",
        steps=(ready_step,) if there and there.universal else (convert,),
    )


def _proof(facts: Facts) -> str:
    saved = f", and DeepSpeed {facts.version} saved it" if facts.version and facts.version != PROVEN_WITH else ""
    return f"as real ranks of DeepSpeed {PROVEN_WITH} did{saved}"


def _memory(needed: int, ranks: int | None, available: int | None) -> Iterator[Finding]:
    if ranks is None or available is None or needed * ranks <= available:
        return
    yield Finding.warning(
        "checkpoint-host-memory",
        f"{ranks} ranks here read {ranks * needed / GIB:.1f} GiB at once, and {available / GIB:.1f} GiB of memory are free",
        evidence=(f"each rank reads at least {needed / GIB:.2f} GiB into the host's memory before it is copied on",),
        fix="load on a machine with more memory, or with fewer ranks on each",
    )
