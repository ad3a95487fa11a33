"""What a run has beside parameters, event by event, put into an account: activations, and of them logits and loss."""

from collections.abc import Iterator

from dsdoctor.memory import names
from dsdoctor.memory.account import Account
from dsdoctor.memory.models import Kind, Run


def head_end(run: Run) -> int:
    """The number of the last event at which a module with parameters ended its forward: what follows is the loss."""
    ends = [number for number, event in enumerate(run.events) if event[0] == Kind.POST_FORWARD]
    loss = next((number for number, event in enumerate(run.events) if event[0] == Kind.LOSS), 0)
    return max((number for number in ends if number < loss), default=0)


def follow(account: Account, run: Run, events: slice) -> Iterator[tuple[Kind, int]]:
    """Each event, with its bytes held: first the most before it, then what is there at it."""
    end = head_end(run)
    before = run.events[end][3] - run.logits if run.events else 0
    in_loss = True
    for number, (kind, index, most, now) in enumerate(run.events[events], events.start or 0):
        in_loss = in_loss and kind != Kind.GRADIENT
        for size in (most, now):
            logits = max(0, size - before) if number > end and in_loss else 0
            if run.logits and logits:
                account.add(
                    names.ACTIVATIONS, min(0, size - logits - account.held.get((names.ACTIVATIONS, "device"), 0))
                )
                account.hold(names.LOGITS, logits)
                account.hold(names.ACTIVATIONS, size - logits)
            else:
                account.hold(names.LOGITS, 0)
                account.hold(names.ACTIVATIONS, size)
        yield Kind(kind), index


def parts(run: Run) -> tuple[slice, slice]:
    """The forward pass, with the loss, and the backward pass."""
    loss = next((number for number, event in enumerate(run.events) if event[0] == Kind.LOSS), -1)
    return slice(0, loss + 1), slice(loss + 1, len(run.events))
