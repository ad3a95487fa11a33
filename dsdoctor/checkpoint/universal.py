"""A tag that is to become universal -> what stands in the way, and what DeepSpeed's converter takes of memory and disk."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.checkpoint.contents import STATE
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.inert import count_of
from dsdoctor.checkpoint.look import names_in
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.trusted_names import untrusted
from dsdoctor.checkpoint.walk import at
from dsdoctor.core.text import and_more

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""What the converter takes of each parameter, whatever the optimizer: ds_to_universal.py, extract_zero_shards."""
WIDTH = 4
IMPORTED = 500 << 20
"""Bytes of a process that imported torch and DeepSpeed: 246 MiB were measured without a GPU, more where torch has CUDA."""
SMALL_FILE = 8 << 10
"""A file of one small tensor: 1.3 kB of zip around it, in blocks of 4 kB."""
MOST_WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, at most: ``disk`` while it runs, ``result`` of it stay, ``memory`` of all processes. ``workers`` of them at once."""

    disk: int
    result: int
    memory: int
    workers: int


def amount(count: int) -> str:
    """Bytes for a reader.

    >>> amount(3 << 30), amount(3 << 20)
    ('3.00 GiB', '3.0 MiB')
    """
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def refusals(examined: Examined) -> Iterator[str]:
    """Why the converter is not started, each reason as a sentence."""
    facts = examined.facts
    if facts.universal:
        yield "it is universal already"
    elif facts.stage not in {1, 2, 3}:
        yield "without ZeRO there are no cut-up optimizer states: it loads with any number of ranks as it is"
    elif facts.experts:
        yield "DeepSpeed's converter (0.19.8) joins the different experts of all ranks to one, and fails"
    elif (facts.tensor or 1) > 1 and not facts.injected:
        yield "no file says how its tensors are cut (universal_checkpoint_info), and the converter would put them together wrongly"
    else:
        yield from _of_files(examined)


def _of_files(examined: Examined) -> Iterator[str]:
    known = {file.path.name for file in examined.tag.files}
    others = tuple(name for name in names_in(examined.tag.folder.path) if name.endswith(".pt") and name not in known)
    if others:
        # it takes every file by the end of its name
        yield f"the converter would take {and_more(others, 3)} too, which this tag does not have: move it away"
    unknown = tuple(file.path.name for file in examined.tag.files if file.unknown)
    if unknown:
        yield f"{and_more(unknown, 3)} could not be read"
    for shard in examined.tag.of(Part.OPTIMIZER)[:1]:
        lacking = [name for name in STATES[1:] if not all(at(group, name) for group in _groups(shard.file.content))]
        if lacking:
            yield f"the converter takes Adam's states, and {shard.file.path.name} has no {' and no '.join(lacking)}"
    names = tuple(f"{name} in {file}" for name, file in untrusted(examined))
    if names:
        yield f"the converter opens files with weights_only=False, which calls what they name, and they name {and_more(names, 3)}"


def _groups(content: object) -> list[object]:
    """The optimizer's states of each group of flat weights."""
    state = at(content, STATE, "base_optimizer_state", "state") or at(content, STATE, STATE, "state")
    return list(state.values()) if isinstance(state, dict) and state else [None]


def needs(examined: Examined, *, cpus: int, available: int | None) -> Needs:
    """What a conversion takes. ``available``: bytes of memory to spare, which bound the workers; None where that is not known.

    A worker reads a rank's whole file and holds a part of it twice; then each parameter is put together, twice for a moment.
    """
    counts = [count_of(shape) for shape in examined.parameters.values()]
    optimizer = max((shard.file.size for shard in examined.tag.of(Part.OPTIMIZER)), default=0)
    model = max((shard.file.size for shard in examined.tag.of(Part.MODEL)), default=0)
    largest = max(counts, default=0) * WIDTH
    one = IMPORTED + max(optimizer + largest, 2 * largest)
    workers = _workers(examined, one, cpus=cpus, available=available)
    main = IMPORTED + max(optimizer, 2 * model)
    disk, result = _disk(examined, counts, optimizer)
    return Needs(
        disk=disk,
        result=result,
        memory=max(one, main) if workers == 1 else main + workers * one,
        workers=workers,
    )


def _workers(examined: Examined, one: int, *, cpus: int, available: int | None) -> int:
    fit = MOST_WORKERS if available is None else available * 3 // 4 // max(1, one) - 1
    return max(1, min(MOST_WORKERS, cpus, len(examined.tag.of(Part.OPTIMIZER)), fit))


def _disk(examined: Examined, counts: list[int], optimizer: int) -> tuple[int, int]:
    """(while it runs, what stays): every rank's piece of each parameter, then each parameter whole, and copies of model states."""
    facts = examined.facts
    ranks = facts.partitions or facts.data or 1
    partitioned = facts.stage is not None and facts.stage >= PARTITIONED
    pieces = len(counts) * ranks if partitioned else len(counts) + ranks
    states = len(STATES) * WIDTH * sum(counts)
    models = sum(shard.file.size for shard in examined.tag.of(Part.MODEL))
    whole = states + (len(STATES) + 1) * len(counts) * SMALL_FILE
    # stage 3: the file of what all ranks share is a copy of the first rank's; below it, weights that no optimizer trains are added
    shared = optimizer if partitioned else 2 * models
    result = whole + models + shared + SMALL_FILE
    return states + (len(STATES) + 1) * pieces * SMALL_FILE + result, result
