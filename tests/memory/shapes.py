"""Models and settings written out, of any size."""

from dsdoctor.memory.models import Kind, Layout, ModelShape, Owner, Run, ZeroSettings

TWO_RANKS = Layout(world=2)


def settings(stage: int, **changes: object) -> ZeroSettings:
    facts: dict[str, object] = {
        "version": "0.19.8",
        "stage": stage,
        "dtype": "bfloat16",
        "accumulation_dtype": "bfloat16",
        "communication_dtype": "bfloat16",
        "micro_batch": 1,
        "optimizer": "adamw",
        "overlap_comm": stage == 3,
    }
    return ZeroSettings(**{**facts, **changes})  # type: ignore[arg-type]


def run_of(counts: list[int], *, activation: int = 1000, logits: int = 0) -> Run:
    """Each module keeps ``activation`` bytes until its gradient is there."""
    events: list[tuple[int, int, int, int]] = []
    now = 0
    for module in range(len(counts)):
        events.append((Kind.PRE_FORWARD, module, now, now))
        now += activation
        events.append((Kind.POST_FORWARD, module, now, now))
    events.append((Kind.LOSS, 0, now + logits, now + logits))
    for module in reversed(range(len(counts))):
        events.append((Kind.PRE_BACKWARD, module, now, now))
        events.append((Kind.GRADIENT, module, now + activation, now))
        now -= activation
        events.append((Kind.POST_BACKWARD, module, now, now))
    events.append((Kind.END, 0, now, now))
    return Run(batch=1, sequence=8, checkpointing=False, events=tuple(events), logits=logits)


def run_again(counts: list[int], *, activation: int = 1000) -> Run:
    """As with activation checkpointing: each module is called again in the backward pass, and saves only then."""
    events: list[tuple[int, int, int, int]] = []
    for module in range(len(counts)):
        events += [(Kind.PRE_FORWARD, module, 0, 0), (Kind.POST_FORWARD, module, activation, 0)]
    events.append((Kind.LOSS, 0, 0, 0))
    for module in reversed(range(len(counts))):
        events += [(Kind.PRE_FORWARD, module, 0, 0), (Kind.POST_FORWARD, module, activation, activation)]
        events += [(Kind.PRE_BACKWARD, module, activation, activation), (Kind.GRADIENT, module, activation, activation)]
        events.append((Kind.POST_BACKWARD, module, activation, 0))
    events.append((Kind.END, 0, 0, 0))
    return Run(batch=1, sequence=8, checkpointing=True, events=tuple(events))


def model_of(counts: list[int], **changes: object) -> ModelShape:
    """A chain of modules with one parameter each."""
    facts: dict[str, object] = {
        "parameters": tuple((f"layer{number}.weight", count, 1) for number, count in enumerate(counts)),
        "modules": tuple(Owner(name=f"layer{number}", parameters=(number,)) for number in range(len(counts))),
        "buffers": 0,
        "runs": (run_of(counts),),
        "name": "Chain",
    }
    return ModelShape(**{**facts, **changes})  # type: ignore[arg-type]
