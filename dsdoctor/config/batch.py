"""The three batch sizes against each other and against the number of ranks."""

from collections.abc import Iterator

from dsdoctor.config.question import Correction, Question, Verdict
from dsdoctor.config.values import BATCH, _is_batch
from dsdoctor.core.finding import Finding

TRAIN, MICRO, ACCUMULATION = BATCH


def batch_sizes(question: Question) -> Iterator[Verdict]:
    """What DeepSpeed's own arithmetic says, for the number of ranks that is named, else for one that could be."""
    mismatched = {each.path for each in question.asked.filled.mismatches} if question.asked.filled else set()
    if mismatched & set(BATCH):
        # the values of the Trainer and of the file are mixed: what fits is told once they agree
        return
    for refusal in question.asked.refusals:
        if refusal.kind == "no batch size":
            title = f"neither {TRAIN} nor {MICRO} is given, and DeepSpeed refuses to start"
            fix = f"set {MICRO}: what one GPU takes at once"
            yield Verdict(finding=Finding.error("config-batch-missing", title, evidence=(refusal.message,), fix=fix))
        elif _is_batch(refusal):
            yield _clash(question, refusal.message)


def batch_size_for_one_world(question: Question) -> Iterator[Verdict]:
    """All three are given: they fit one number of ranks, which nobody named."""
    sizes = [question.judged.get(name) for name in BATCH]
    if (
        question.asked.world is not None
        or question.in_training
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        return
    train, micro, accumulation = (int(size or 0) for size in sizes)
    if train % (micro * accumulation) == 0 and train > micro * accumulation:
        ranks = train // (micro * accumulation)
        title = f"the batch sizes fit {ranks} data-parallel ranks, and no other number"
        fix = f"take {TRAIN} out to train on any number, or judge it with --world {ranks}"
        yield Verdict(finding=Finding.note("config-batch-one-world", title, fix=fix), path=(TRAIN,))


def _clash(question: Question, message: str) -> Verdict:
    sizes = {name: question.judged.get(name) for name in BATCH if name in question.judged}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if question.filled_by and ACCUMULATION not in question.config and ACCUMULATION in sizes:
        return _accumulation_of_accelerate(said, sizes[ACCUMULATION], message)
    world = question.asked.world
    title = f"{said} do not fit {_ranks(world)}{_would_fit(sizes)}"
    if any(size <= 0 for size in sizes.values() if type(size) is int):
        title = f"{said}: a batch size is greater than 0"
    elif len(sizes) == 1 and world:
        title = (
            f"{TRAIN} {sizes.get(TRAIN)} is smaller than the {world} ranks that share it, or does not divide by them"
        )
    whole = len(sizes) == len(BATCH) and all(type(size) is int and size > 0 for size in sizes.values())
    fix = f"set {MICRO} and {ACCUMULATION}, and leave {TRAIN} to DeepSpeed"
    if whole:
        fix = f"take {TRAIN} out: DeepSpeed computes it as {MICRO} x {ACCUMULATION} x ranks"
    found = Finding.error("config-batch-sizes-clash", title, evidence=(message,), fix=fix)
    return Verdict(finding=found, path=(TRAIN,), correction=Correction(path=(TRAIN,)) if whole else None)


def _ranks(world: int | None) -> str:
    return "any number of ranks" if world is None else "1 rank" if world == 1 else f"{world} ranks"


def _would_fit(sizes: dict[str, object]) -> str:
    """The number of ranks that they would fit: a launcher that starts another number is the usual cause.

    >>> _would_fit({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})
    ': they would fit 8'
    """
    train, micro, accumulation = (sizes.get(name) for name in BATCH)
    if not (type(train) is int and type(micro) is int and type(accumulation) is int) or micro * accumulation <= 0:
        return ""
    return (
        f": they would fit {train // (micro * accumulation)}"
        if train > 0 and train % (micro * accumulation) == 0
        else ""
    )


def _accumulation_of_accelerate(said: str, steps: object, message: str) -> Verdict:
    """The file leaves the accumulation out: then accelerate's plugin does not take it from TrainingArguments."""
    title = f"{said} do not fit: the file has no {ACCUMULATION}, and accelerate puts {steps} there"
    fix = f'add "{ACCUMULATION}": "auto"'
    found = Finding.error("config-batch-sizes-clash", title, evidence=(message,), fix=fix)
    return Verdict(finding=found, path=(ACCUMULATION,), correction=Correction(path=(ACCUMULATION,), value='"auto"'))
