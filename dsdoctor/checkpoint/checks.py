"""A tag that was looked at -> findings: the files that it must have, their order, what they say of each other. Asks nothing.

A tag whose files speak of others that are not there shows which, and what stands in the folder under a name like theirs. The flat
fp32 weights of all ranks together have the elements that the parameters have, by DeepSpeed's own arithmetic.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from dsdoctor.checkpoint.facts import (
    PARTITIONED,
    RANKS,
    STAGE,
    STATE,
    TYPE,
    Examined,
    Shapes,
    groups_of,
    optimizer_steps,
    shapes_of,
)
from dsdoctor.checkpoint.folder import (
    GROUPS,
    UNIVERSAL,
    Part,
    Shard,
    expert_name,
    layer_name,
    model_name,
    names_in,
    optimizer_name,
    parse_name,
)
from dsdoctor.checkpoint.inert_pickle import Call, at, count_of
from dsdoctor.checkpoint.parameters import only_in_module
from dsdoctor.checkpoint.torch_file import DENIED
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more, and_more_lines, counted
from dsdoctor.rules import book

MAX_FILES = 1_000_000
"""Whatever numbers of ranks, stages and experts a file claims."""
MAX_FILES_NAMED = 12
"""In a finding."""
UNFINISHED = {".part", ".partial", ".tmp", ".crdownload", ".aria2", ".incomplete"}
"""What programs add to the name of a file that they have not finished."""


def missing_files(examined: Examined) -> tuple[str, ...]:
    """Files that are not there and must be, each once, in order."""
    there = set(examined.tag.folder.files)
    wanted = _universal(examined) if examined.facts.universal else _sharded(examined)
    return tuple(dict.fromkeys(name for name in itertools.islice(wanted, MAX_FILES) if name not in there))


def _sharded(examined: Examined) -> Iterator[str]:
    facts = examined.facts
    ranks = range(facts.partitions or facts.data or 0)
    for model in _model_ranks(examined):
        if facts.stage is not None and facts.stage >= PARTITIONED:
            yield from (model_name(data, model) for data in ranks)
        else:
            yield model_name(None, model)
        if examined.optimizer and (facts.sharded_optimizer or (facts.stage or 0) > 0):
            bf16 = facts.bf16 if facts.sharded_optimizer else facts.dtype == "bf16"
            names = (optimizer_name(data, model, bf16=bf16) for data in ranks)
            yield from (name for name in names if name.replace("_optim", "optim") not in examined.tag.folder.files)
    yield from _experts(examined)
    yield from _layers(examined)


def _model_ranks(examined: Examined) -> range:
    if examined.facts.model is not None:
        return range(examined.facts.model)
    seen = [shard.name.model for shard in examined.tag.shards if shard.name.model is not None]
    return range(max(seen, default=0) + 1)


def _experts(examined: Examined) -> Iterator[str]:
    """Each expert of each MoE layer; where tensors are cut up too, only what the other experts have."""
    seen = {shard.name.model or 0 for shard in examined.tag.of(Part.EXPERT)} or {0}
    for layer, count in enumerate(examined.facts.experts):
        yield from (expert_name(layer, expert, model) for expert in range(count) for model in sorted(seen))
    ranks = {shard.name.expert or 0 for shard in examined.tag.of(Part.EXPERT_OPTIMIZER)}
    without = examined.facts.experts and examined.facts.stage == 0
    for rank in range(max(ranks, default=0) + 1 if ranks or without else 0):
        yield f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def _layers(examined: Examined) -> Iterator[str]:
    """A pipeline's layers, by the numbers that its trainable parameters begin with."""
    if not examined.facts.layers:
        return
    models = sorted(
        {shard.name.model for shard in examined.tag.of(Part.LAYER)}, key=lambda each: -1 if each is None else each
    )
    first = {name.partition(".")[0] for name in examined.parameters}
    for layer in sorted(int(each) for each in first if each.isdecimal()):
        yield from (layer_name(layer, model) for model in models)


def _universal(examined: Examined) -> Iterator[str]:
    """The states of a universal tag: of stage 3 the first rank's are read, whatever there are."""
    if examined.facts.stage is not None and examined.facts.stage >= PARTITIONED:
        yield from (model_name(0, model) for model in _model_ranks(examined))
    else:
        yield from (model_name(None, model) for model in _model_ranks(examined))


def missing_states(examined: Examined) -> tuple[str, ...]:
    """Files that a universal tag lacks: the optimizer's groups, and of a trainable parameter what most others have."""
    without = examined.facts.universal and examined.tag.groups is None
    return (*((f"{UNIVERSAL}/{GROUPS}",) if without else ()), *_missing_of_parameters(examined))


def _missing_of_parameters(examined: Examined) -> tuple[str, ...]:
    folders = {
        parameter.name: {file.path.name for file in parameter.files} for parameter in examined.tag.parameters or ()
    }
    groups = [group for shard in examined.tag.of(Part.MODEL) for group in shapes_of(shard.file.content) or ()]
    trained = list(dict.fromkeys(name for group in groups for name in group))
    counted = Counter(file for name in trained for file in folders.get(name, ()))
    usual = sorted(file for file, times in counted.items() if times * 2 > len(trained))
    if not usual:
        return ()
    return tuple(f"zero/{name}/{file}" for name in trained for file in usual if file not in folders.get(name, ()))


def missing(examined: Examined) -> Iterator[Finding]:
    """Files that the others speak of and that are not there."""
    gone = (*missing_files(examined), *missing_states(examined))
    if gone:
        yield book.finding(
            "checkpoint-shard-missing",
            Severity.ERROR,
            case="optimizer-alone" if _optimizer_alone(examined, gone) else "",
            evidence=[*and_more_lines(gone, MAX_FILES_NAMED), *_similar_names(examined, gone)[:4]],
            files=counted(len(gone), "file"),
            tag=examined.tag.folder.name,
            tag_folder=str(examined.tag.folder.path),
            folder=str(examined.folder.path),
        )


def _optimizer_alone(examined: Examined, gone: tuple[str, ...]) -> bool:
    """Whether only the optimizer's files are missing while the weights are in another file, as below stage 3."""
    names = [parse_name(name) for name in gone]
    only = all(name is not None and name.part == Part.OPTIMIZER.name for name in names)
    return only and not examined.facts.universal and (examined.facts.stage or PARTITIONED) < PARTITIONED


def _similar_names(examined: Examined, gone: tuple[str, ...]) -> list[str]:
    """Files in the folder whose name is like that of a missing one, each as a line."""
    names = set(names_in(examined.tag.folder.path)) - set(examined.tag.folder.files)
    return [f"there is {name}, {how}" for name in sorted(names) for wanted in gone if (how := _likeness(name, wanted))]


def _likeness(name: str, wanted: str) -> str:
    """How a name came about where another one is wanted, "" for none that is like it.

    >>> _likeness("mp_rank_00_model_states (1).pt", "mp_rank_00_model_states.pt")
    'a renamed copy, as a manual copy or cloud storage leaves it'
    >>> _likeness("mp_rank_00_model_states.pt.sha256", "mp_rank_00_model_states.pt")
    'a name that starts the same'
    """
    if name.startswith(".") and name[1:].rpartition(".")[0] == wanted:
        # .NAME.XXXXXX: rsync keeps it so while it copies
        return "as an interrupted copy leaves it"
    if name != wanted and name.casefold() == wanted.casefold():
        return "with upper case where lower case is expected, or the reverse"
    if name.startswith(f"{wanted}."):
        unfinished = name[len(wanted) :].casefold() in UNFINISHED
        return "as an interrupted save or download leaves it" if unfinished else "a name that starts the same"
    stem = wanted.removesuffix(".pt")
    if name.startswith((f"{stem} ", f"{stem}(", f"{stem}-", f"Copy of {stem}")):
        return "a renamed copy, as a manual copy or cloud storage leaves it"
    return ""


def size_problems(examined: Examined) -> Iterator[str]:
    """A line for each group whose sizes do not fit. Groups with experts, which not all ranks share, are left out."""
    facts = examined.facts
    if facts.universal or facts.experts or not facts.partitions:
        return
    for model in sorted({shard.name.model or 0 for shard in examined.tag.of(Part.OPTIMIZER)}):
        ranks = [shard for shard in examined.tag.of(Part.OPTIMIZER) if (shard.name.model or 0) == model]
        states = [shard for shard in examined.tag.of(Part.MODEL) if (shard.name.model or 0) == model]
        shapes = shapes_of(states[0].file.content) if states else None
        if shapes is not None and facts.stage is not None:
            check = _stage3 if facts.stage >= PARTITIONED else _stage12
            yield from check(ranks, shapes, facts.partitions)


def _stage12(ranks: list[Shard], shapes: list[Shapes], world: int) -> Iterator[str]:
    """The ranks' pieces follow each other; all of them together may be padded to a multiple of twice the ranks."""
    groups = [groups_of(shard) for shard in ranks]
    if any(each is None or len(each) != len(shapes) for each in groups):
        return
    paddings = at(ranks[0].file.content, STATE, "param_alignment_paddings")
    for number, group in enumerate(shapes):
        there = sum(each[number].count for each in groups if each)
        extra = at(paddings, number)
        wanted = sum(count_of(shape) for shape in group.values())
        wanted += sum(extra) if isinstance(extra, list) and all(isinstance(each, int) for each in extra) else 0
        if _padded(there, world) != _padded(wanted, world):
            yield f"group {number}: {len(ranks)} shards hold {there:,} elements, its {len(group)} parameters have {wanted:,}"


def _stage3(ranks: list[Shard], shapes: list[Shapes], world: int) -> Iterator[str]:
    """Each rank holds its piece of each parameter, padded to the same size on all ranks."""
    wanted = sum(-(-count_of(shape) // world) for group in shapes for shape in group.values())
    for shard in ranks:
        groups = groups_of(shard)
        there = None if groups is None else sum(each.count for each in groups)
        if there is not None and there != wanted:
            yield f"{shard.file.path.name} holds {there:,} elements, but its share of the parameters is {wanted:,}"


def _padded(count: int, world: int) -> int:
    # whole numbers: a file may claim more elements than a float can count
    return -(-count // (2 * world)) * 2 * world


def judge_tag(examined: Examined) -> tuple[Finding, ...]:
    """All findings about one tag, what stands in the way first."""
    return tuple(finding for check in CHECKS for finding in check(examined))


def ambiguous(examined: Examined) -> Iterator[Finding]:
    """Files whose zip another reader could take for other contents."""
    found = [file for file in examined.tag.files if file.ambiguous]
    if found:
        yield book.finding(
            "checkpoint-file-ambiguous",
            Severity.ERROR,
            evidence=[f"{_name(examined, file.path)}: {file.problem}" for file in found[:MAX_FILES_NAMED]],
            files=counted(len(found), "file") if len(found) > 1 else found[0].path.name,
            tag=examined.tag.folder.name,
            tag_folder=str(examined.tag.folder.path),
        )


def damaged(examined: Examined) -> Iterator[Finding]:
    """Files that are there and not whole."""
    broken = [file for file in examined.tag.files if file.problem and not file.ambiguous]
    if broken:
        yield book.finding(
            "checkpoint-file-damaged",
            Severity.ERROR,
            evidence=[f"{_name(examined, file.path)}: {file.problem}" for file in broken[:MAX_FILES_NAMED]],
            files=counted(len(broken), "file") if len(broken) > 1 else broken[0].path.name,
            tag=examined.tag.folder.name,
            tag_folder=str(examined.tag.folder.path),
        )


def misplaced(examined: Examined) -> Iterator[Finding]:
    """Files that were written under another shard's name: torch keeps the name in the zip."""
    wrong = []
    for shard in examined.tag.shards:
        written = parse_name(f"{shard.file.root}.pt")
        if written is not None and replace(written, bf16=shard.name.bf16) != shard.name:
            wrong.append(f"{shard.file.path.name} was written as {shard.file.root}.pt")
    if wrong:
        yield book.finding(
            "checkpoint-shards-mixed",
            Severity.ERROR,
            case="misplaced",
            evidence=wrong[:MAX_FILES_NAMED],
            files=counted(len(wrong), "file"),
            tag=examined.tag.folder.name,
        )


def mixed(examined: Examined) -> Iterator[Finding]:
    """Files that speak of different runs or steps."""
    for what, values in _said(examined.tag.shards):
        kinds: dict[object, list[str]] = defaultdict(list)
        for file, value in values:
            if value is not None:
                kinds[value].append(file)
        if len(kinds) > 1:
            yield book.finding(
                "checkpoint-shards-mixed",
                Severity.ERROR,
                evidence=[f"{_short(value)}: {and_more(tuple(files), 4)}" for value, files in kinds.items()],
                subject=what,
                tag=examined.tag.folder.name,
                tag_folder=str(examined.tag.folder.path),
            )


def _said(shards: tuple[Shard, ...]) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    models = [shard for shard in shards if shard.part is Part.MODEL]
    optimizers = [shard for shard in shards if shard.part is Part.OPTIMIZER]
    for what, key in (
        ("the step", "global_steps"),
        ("the data-parallel ranks", "dp_world_size"),
        ("the model-parallel ranks", "mp_world_size"),
    ):
        yield what, [(shard.file.path.name, _if_int(at(shard.file.content, key))) for shard in models]
    yield (
        "the steps that the optimizer took",
        [(shard.file.path.name, optimizer_steps(shard.file)) for shard in optimizers],
    )
    yield "the learning rate", [(shard.file.path.name, _rates(shard)) for shard in optimizers]
    yield "the loss scale", [(shard.file.path.name, _loss_scale(shard)) for shard in optimizers]
    yield "the ranks that share the optimizer", [(shard.file.path.name, _partitions(shard)) for shard in optimizers]
    yield "whether the run trains in bf16", [(shard.file.path.name, shard.name.bf16) for shard in optimizers]
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
        causes = set(examined.leftovers.values())
        yield book.finding(
            "checkpoint-leftover-shards",
            Severity.WARNING,
            evidence=[*examined.leftovers][:MAX_FILES_NAMED],
            files=counted(len(examined.leftovers), "file"),
            tag=examined.tag.folder.name,
            causes=" or ".join(cause for cause in (RANKS, STAGE, TYPE) if cause in causes),
        )


def renamed(examined: Examined) -> Iterator[Finding]:
    """Optimizer files of a bf16 run without the mark that such a run looks for."""
    if examined.facts.dtype != "bf16" or examined.facts.universal:
        return
    without = [shard.file.path.name for shard in examined.tag.of(Part.OPTIMIZER) if not shard.name.bf16]
    if without:
        yield book.finding(
            "checkpoint-shards-mixed",
            Severity.ERROR,
            case="without-bf16",
            evidence=without[:MAX_FILES_NAMED],
            files=counted(len(without), "optimizer file"),
            tag=examined.tag.folder.name,
        )


def sizes(examined: Examined) -> Iterator[Finding]:
    """Shards that together hold more or less than the parameters have."""
    if missing_files(examined) or any(file.problem or file.unknown for file in examined.tag.files):
        return
    problems = tuple(size_problems(examined))
    if problems:
        yield book.finding(
            "checkpoint-sizes-differ",
            Severity.ERROR,
            evidence=problems[:MAX_FILES_NAMED],
            tag=examined.tag.folder.name,
            tag_folder=str(examined.tag.folder.path),
        )


def not_read(examined: Examined) -> Iterator[Finding]:
    """Files that this look does not understand: nothing is said of them."""
    denied = [_name(examined, file.path) for file in examined.tag.files if file.unknown == DENIED]
    if denied:
        yield book.finding(
            "checkpoint-not-yours",
            Severity.WARNING,
            evidence=denied[:MAX_FILES_NAMED],
            files=counted(len(denied), "file") if len(denied) > 1 else denied[0],
            tag=examined.tag.folder.name,
            tag_folder=str(examined.tag.folder.path),
        )
    unknown = [file for file in examined.tag.files if file.unknown and file.unknown != DENIED]
    if unknown:
        yield book.finding(
            "checkpoint-not-read",
            Severity.NOTE,
            evidence=[f"{_name(examined, file.path)}: {file.unknown}" for file in unknown[:MAX_FILES_NAMED]],
            files=counted(len(unknown), "file"),
            tag=examined.tag.folder.name,
        )


def frozen_left_out(examined: Examined) -> Iterator[Finding]:
    """Frozen layers that stand in the module only: below stage 2 DeepSpeed saves no other record of them."""
    facts = examined.facts
    if facts.universal or facts.layers or not facts.stage or facts.stage >= PARTITIONED:
        return
    names = [name for shard in examined.tag.of(Part.MODEL) for name in only_in_module(examined, shard)]
    if names:
        yield book.finding(
            "checkpoint-frozen-left-out",
            Severity.NOTE,
            evidence=[and_more(tuple(names), 6)],
            parameters=counted(len(names), "frozen parameter"),
            tag=examined.tag.folder.name,
            folder=str(examined.folder.path),
        )


def _name(examined: Examined, path: object) -> str:
    return str(path).removeprefix(f"{examined.tag.folder.path}/")


CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    ambiguous,
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
