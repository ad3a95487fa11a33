"""A tag that was looked at -> findings: files, their order, what they say of each other. Asks nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from dsdoctor.checkpoint.archive import DENIED
from dsdoctor.checkpoint.contents import STATE, optimizer_steps, shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, RANKS, STAGE, TYPE, Examined
from dsdoctor.checkpoint.expected import missing_files
from dsdoctor.checkpoint.frozen import only_in_module
from dsdoctor.checkpoint.inert import Call
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.missing import MOST, listed, missing
from dsdoctor.checkpoint.names import Part, parse_name
from dsdoctor.checkpoint.sizes import size_problems
from dsdoctor.checkpoint.walk import at
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more


def judge_tag(examined: Examined) -> tuple[Finding, ...]:
    """All findings about one tag, what stands in the way first."""
    return tuple(finding for check in CHECKS for finding in check(examined))


def damaged(examined: Examined) -> Iterator[Finding]:
    """Files that are there and not whole."""
    broken = [file for file in examined.tag.files if file.problem]
    if broken:
        many = (
            f"{len(broken)} files of {examined.tag.folder.name} are" if len(broken) > 1 else f"{broken[0].path.name} is"
        )
        yield Finding.error(
            "checkpoint-file-damaged",
            f"{many} not whole",
            evidence=[f"{_name(examined, file.path)}: {file.problem}" for file in broken[:MOST]],
            fix="take an older tag, or copy the file anew from where it is whole",
            steps=listed(examined),
        )


def misplaced(examined: Examined) -> Iterator[Finding]:
    """Files that were written under another shard's name: torch keeps the name in the zip."""
    wrong = []
    for shard in examined.tag.shards:
        written = parse_name(f"{shard.file.root}.pt")
        if written is not None and replace(written, bf16=shard.name.bf16) != shard.name:
            wrong.append(f"{shard.file.path.name} was written as {shard.file.root}.pt")
    if wrong:
        yield Finding.error(
            "checkpoint-shards-mixed",
            f"{len(wrong)} file{'s' * (len(wrong) > 1)} of {examined.tag.folder.name} "
            f"{'stand' if len(wrong) > 1 else 'stands'} in another's place",
            evidence=wrong[:MOST],
            fix="give each file the name under which it was written",
        )


def mixed(examined: Examined) -> Iterator[Finding]:
    """Files that speak of different runs or steps."""
    for what, values in _said(examined.tag.shards):
        kinds: dict[object, list[str]] = defaultdict(list)
        for file, value in values:
            if value is not None:
                kinds[value].append(file)
        if len(kinds) > 1:
            yield Finding.error(
                "checkpoint-shards-mixed",
                f"the files of {examined.tag.folder.name} do not agree on {what}",
                evidence=[f"{_short(value)}: {and_more(tuple(files), 4)}" for value, files in kinds.items()],
                fix="they are of different saves: take a tag whose files are of one",
                steps=listed(examined),
            )


def _said(shards: tuple[Shard, ...]) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    models = [shard for shard in shards if shard.part is Part.MODEL]
    optimizers = [shard for shard in shards if shard.part is Part.OPTIMIZER]
    yield "the step", [(shard.file.path.name, at(shard.file.content, "global_steps")) for shard in models]
    yield (
        "the data-parallel ranks",
        [(shard.file.path.name, at(shard.file.content, "dp_world_size")) for shard in models],
    )
    yield (
        "the model-parallel ranks",
        [(shard.file.path.name, at(shard.file.content, "mp_world_size")) for shard in models],
    )
    yield (
        "the steps that the optimizer made",
        [(shard.file.path.name, optimizer_steps(shard.file)) for shard in optimizers],
    )
    yield "the learning rate", [(shard.file.path.name, _rates(shard)) for shard in optimizers]
    yield "the loss scale", [(shard.file.path.name, _loss_scale(shard)) for shard in optimizers]
    yield "the ranks that share the optimizer", [(shard.file.path.name, _partitions(shard)) for shard in optimizers]
    yield "whether the training is in bf16", [(shard.file.path.name, shard.name.bf16) for shard in optimizers]
    for model in sorted({shard.name.model or 0 for shard in models}):
        same = [shard for shard in models if (shard.name.model or 0) == model]
        yield "the parameters", [(shard.file.path.name, _shape_key(shard)) for shard in same]


def _rates(shard: Shard) -> object:
    """The learning rate of each group, of the optimizer's own kind; None where one is no number."""
    state = at(shard.file.content, STATE)
    groups = at(state, "base_optimizer_state", "param_groups") or at(state, STATE, "param_groups")
    rates = tuple(at(group, "lr") for group in groups) if isinstance(groups, list) else ()
    return rates if rates and all(isinstance(rate, float) for rate in rates) else None


def _loss_scale(shard: Shard) -> object:
    scaler = at(shard.file.content, STATE, "loss_scaler")
    scale = at(scaler.state, "cur_scale") if isinstance(scaler, Call) else None
    return scale if isinstance(scale, int | float) else None


def _partitions(shard: Shard) -> object:
    counts = at(shard.file.content, "optimizer_state_dict", "partition_count")
    return (
        tuple(counts) if isinstance(counts, list) and all(isinstance(each, int) for each in counts) else _if_int(counts)
    )


def _if_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _shape_key(shard: Shard) -> object:
    groups = shapes_of(shard.file.content)
    return None if groups is None else tuple(item for group in groups for item in group.items())


def _short(value: object) -> str:
    return (
        f"{len(value)} parameters" if isinstance(value, tuple) and value and isinstance(value[0], tuple) else str(value)
    )


def left_over(examined: Examined) -> Iterator[Finding]:
    """Files of ranks, of a stage or of a type that the run which saved last did not have."""
    if examined.leftovers:
        many, found = len(examined.leftovers), set(examined.leftovers.values())
        causes = " or ".join(f"of {cause}" for cause in (RANKS, STAGE, TYPE) if cause in found)
        yield Finding.warning(
            "checkpoint-leftover-shards",
            f"{many} file{'s' * (many > 1)} of {examined.tag.folder.name} {'are' if many > 1 else 'is'} of another run: "
            f"{causes} that the run which saved it did not have",
            evidence=[*examined.leftovers][:MOST],
            fix="load_checkpoint does not open them; zero_to_fp32.py does: move them away before it runs",
        )


def renamed(examined: Examined) -> Iterator[Finding]:
    """Optimizer files of a bf16 run without the mark that such a run looks for."""
    if examined.facts.dtype != "bf16" or examined.facts.universal:
        return
    without = [shard.file.path.name for shard in examined.tag.of(Part.OPTIMIZER) if not shard.name.bf16]
    if without:
        yield Finding.error(
            "checkpoint-shards-mixed",
            f"{len(without)} optimizer file{'s' * (len(without) > 1)} of {examined.tag.folder.name} "
            f"lack{'s' * (len(without) == 1)} the bf16_ in the name that a bf16 run looks for",
            evidence=without[:MOST],
            fix="give each file the name under which it was written: bf16_ before the name that it has",
        )


def sizes(examined: Examined) -> Iterator[Finding]:
    """Shards that together hold more or less than the parameters have."""
    if missing_files(examined) or any(file.problem or file.unknown for file in examined.tag.files):
        return
    problems = tuple(size_problems(examined))
    if problems:
        yield Finding.error(
            "checkpoint-sizes-differ",
            f"the shards of {examined.tag.folder.name} do not fit its parameters",
            evidence=problems[:MOST],
            fix="they are of different runs: take a tag whose files are of one",
            steps=listed(examined),
        )


def not_read(examined: Examined) -> Iterator[Finding]:
    """Files that this look does not understand: nothing is said of them."""
    denied = [_name(examined, file.path) for file in examined.tag.files if file.unknown == DENIED]
    if denied:
        many = f"{len(denied)} files" if len(denied) > 1 else denied[0]
        yield Finding.warning(
            "checkpoint-not-yours",
            f"you may not read {many} of {examined.tag.folder.name}: a training that you start cannot load it",
            evidence=denied[:MOST],
            fix="start the training as the user who saved it, or let that user give the right to read",
            steps=listed(examined),
        )
    unknown = [file for file in examined.tag.files if file.unknown and file.unknown != DENIED]
    if unknown:
        yield Finding.note(
            "checkpoint-not-read",
            f"{len(unknown)} file{'s' * (len(unknown) > 1)} of {examined.tag.folder.name} could not be judged",
            evidence=[f"{_name(examined, file.path)}: {file.unknown}" for file in unknown[:MOST]],
        )


def frozen_left_out(examined: Examined) -> Iterator[Finding]:
    """Frozen layers that stand in the module only: below stage 2 DeepSpeed saves no other record of them."""
    facts = examined.facts
    if facts.universal or facts.layers or not facts.stage or facts.stage >= PARTITIONED:
        return
    names = [name for shard in examined.tag.of(Part.MODEL) for name in only_in_module(examined, shard)]
    if names:
        yield Finding.note(
            "checkpoint-frozen-left-out",
            f"zero_to_fp32.py leaves {len(names)} frozen parameter{'s' * (len(names) > 1)} of {examined.tag.folder.name} out",
            evidence=[and_more(tuple(names), 6)],
            fix="load_checkpoint restores them; a merged model takes them from the model states",
        )


def _name(examined: Examined, path: object) -> str:
    return str(path).removeprefix(f"{examined.tag.folder.path}/")


CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    damaged,
    missing,
    misplaced,
    renamed,
    mixed,
    sizes,
    left_over,
    frozen_left_out,
    not_read,
)
