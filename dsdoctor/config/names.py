"""A key that is none -> the key that was meant, where that can be told. Pure text."""

from collections.abc import Iterable

LONGEST = 80
"""Characters. Longer names are nobody's typing mistakes."""


def plain(name: str) -> str:
    """A name without what people write differently.

    >>> plain("offloadOptimizer") == plain("offload-optimizer") == plain("offload_optimizer")
    True
    """
    return "".join(char for char in name.lower() if char.isalnum())


def distance(one: str, other: str) -> int:
    """How many letters were left out, put in, exchanged or swapped with their neighbour.

    >>> distance("stage", "satge"), distance("zero", "zeros"), distance("fp16", "bf16")
    (1, 1, 2)
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        now = [row]
        for column, right in enumerate(other, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (left != right))
            if row > 1 and column > 1 and left == other[column - 2] and one[row - 2] == right:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]


def nearest(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a wrong one may have been meant for, all equally near; none where nothing is near.

    >>> nearest("zero_optimisation", ["zero_optimization", "optimizer"]), nearest("learning_rate", ["lr"])
    (('zero_optimization',), ())
    >>> nearest("f16", ["fp16", "bf16"]), nearest("micro_batch_size", ["train_micro_batch_size_per_gpu", "aio"])
    (('bf16', 'fp16'), ('train_micro_batch_size_per_gpu',))
    """
    if len(name) > LONGEST:
        return ()
    typed = plain(name)
    if len(typed) < 2:
        return ()
    scores = {known: distance(typed, plain(known)) for known in set(names) if abs(len(plain(known)) - len(typed)) <= 4}
    allowed = 1 if len(typed) <= 5 else 2 if len(typed) <= 12 else 3
    best = min(scores.values(), default=allowed + 1)
    if best <= allowed:
        # AdamW of torch and adamw of DeepSpeed are one name for who types it
        found = {plain(known): known for known in sorted(scores, reverse=True) if scores[known] == best}
        return tuple(sorted(found.values()))
    within = [known for known in set(names) if len(typed) >= 6 and typed in plain(known)]
    return tuple(within) if len(within) == 1 else ()
