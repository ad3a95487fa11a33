"""The configuration against the GPUs and the DeepSpeed it will run with. Generators of verdicts."""

from collections.abc import Iterator

from dsdoctor.config.question import Question, Verdict
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.text import and_more


def precision_of_gpus(question: Question) -> Iterator[Verdict]:
    """fp16 and bf16 against what the GPUs compute in."""
    facts = question.asked.facts
    if facts is None or not question.capabilities:
        return
    least = min(question.capabilities, key=_numbers)
    if facts.fp16 and _numbers(least) < (7, 0):
        title = f"fp16 is switched on, and DeepSpeed refuses it on a GPU of capability {least}: it wants 7.0"
        fix = "train in fp32, or on newer GPUs; DS_ALLOW_DEPRECATED_FP16=1 lets 6.x through"
        yield Verdict(finding=Finding.error("config-precision-unsupported", title, fix=fix), path=("fp16", "enabled"))
    if facts.bf16 and _numbers(least) < (8, 0):
        title = (
            f"bf16 is switched on, and a GPU of capability {least} has no arithmetic for it: torch emulates it, slowly"
        )
        fix = "take fp16 on these GPUs; bf16 is from capability 8.0 on"
        yield Verdict(finding=Finding.warning("config-precision-unsupported", title, fix=fix), path=("bf16", "enabled"))


def ops_not_built(question: Question) -> Iterator[Verdict]:
    """Ops that this configuration loads, and that the installed DeepSpeed holds no compiled form of."""
    if not question.missing_ops:
        return
    names = list(question.missing_ops)
    are = "is" if len(names) == 1 else "are"
    title = f"{and_more(names)} {are} not built into the installed DeepSpeed, and compiled when the training starts"
    said = tuple(f"{op}: {why}" for op, why in question.missing_ops.items())
    found = Finding.note(
        "config-ops-not-built",
        title,
        evidence=said,
        affects=names,
        fix="install a DeepSpeed that has them, before all ranks compile at once",
        steps=(step("python -m dsdoctor install --for {file}", file=question.file),),
    )
    yield Verdict(finding=found)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())
