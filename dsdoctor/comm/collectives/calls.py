"""How each collective is called, and the expected result: a call -> this rank's result, and what it should be.

torch.distributed's default group must be initialized. Nothing here compares or judges; see ``exchange``.
"""

from dataclasses import dataclass
from typing import Any

from dsdoctor.comm.collectives.values import CollectiveCall
from dsdoctor.comm.torch_ops import newest, spread_rounds

Buffer = Any
"""A tensor: torch is imported by the data process only."""
GUARD = 3
"""Elements around a buffer that must not be changed."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """What this rank must have: the values, and who sent which part of them (rank, elements); no senders for a reduced
    result."""

    values: Buffer
    senders: tuple[tuple[int, int], ...] = ()


def operator(call: CollectiveCall) -> Any:
    """torch's ReduceOp for the reduction of a call."""
    import torch.distributed as dist

    assert call.reduction is not None
    if (found := getattr(dist.ReduceOp, call.reduction.value, None)) is None:
        raise NotImplementedError(f"torch.distributed has no ReduceOp.{call.reduction.value}")
    return found


def chunk(call: CollectiveCall) -> int:
    """The length of an input of one chunk."""
    return call.elements


def chunks(call: CollectiveCall) -> int:
    """The length of an input of a chunk for each rank."""
    return call.elements * call.group.world


def all_reduce(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In place."""
    newest("all_reduce")(mine, op=operator(call))
    return mine


def all_reduce_slice(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In the middle of a larger buffer, from an odd address on: what is around it must not change."""
    whole = call.blank(len(mine) + 2 * GUARD)
    whole[GUARD:-GUARD] = mine
    newest("all_reduce")(whole[GUARD:-GUARD], op=operator(call))
    return whole


def reduced(call: CollectiveCall) -> Want:
    """All ranks' values, reduced."""
    return Want(values=call.reduced(0, call.elements))


def reduced_in_guards(call: CollectiveCall) -> Want:
    """The reduced values in the middle of untouched ones."""
    whole = call.blank(call.elements + 2 * GUARD)
    whole[GUARD:-GUARD] = call.reduced(0, call.elements)
    return Want(values=whole)


def reduce(call: CollectiveCall, mine: Buffer) -> Buffer | None:
    """In place, at the root."""
    newest("reduce")(mine, call.root, op=operator(call))
    return mine if call.group.rank == call.root else None


def reduced_at_root(call: CollectiveCall) -> Want | None:
    """The reduced values at the root alone."""
    return reduced(call) if call.group.rank == call.root else None


def reduce_scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Into one tensor, as ZeRO does."""
    result = call.blank(call.elements)
    newest("reduce_scatter_single", "reduce_scatter_tensor")(result, mine, op=operator(call))
    return result


def my_part_reduced(call: CollectiveCall) -> Want:
    """This rank's chunk of the reduced values."""
    start = call.group.rank * call.elements
    return Want(values=call.reduced(start, start + call.elements))


def all_gather(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Into one tensor, as ZeRO does."""
    result = call.blank(chunks(call))
    newest("all_gather_single", "all_gather_into_tensor")(result, mine)
    return result


def all_gather_in_place(call: CollectiveCall, mine: Buffer) -> Buffer:
    """The input is a part of the result."""
    result = call.blank(chunks(call))
    part = result[call.group.rank * call.elements :][: call.elements]
    part.copy_(mine)
    newest("all_gather_single", "all_gather_into_tensor")(result, part)
    return result


def gather(call: CollectiveCall, mine: Buffer) -> Buffer | None:
    """Into a list at the root."""
    result = call.blank(chunks(call)) if call.group.rank == call.root else None
    newest("gather")(mine, None if result is None else list(result.split(call.elements)), dst=call.root)
    return result


def of_all(call: CollectiveCall) -> Want:
    """Every rank's chunk."""
    return _joined(call, [(rank, 0, call.elements) for rank in range(call.group.world)])


def of_all_at_root(call: CollectiveCall) -> Want | None:
    """Every rank's chunk, at the root alone."""
    return of_all(call) if call.group.rank == call.root else None


def broadcast(call: CollectiveCall, mine: Buffer) -> Buffer:
    """From the root, into a buffer that was not written before."""
    buffer = mine if call.group.rank == call.root else call.blank(call.elements)
    newest("broadcast")(buffer, call.root)
    return buffer


def of_root(call: CollectiveCall) -> Want:
    """The root's values."""
    return _joined(call, [(call.root, 0, call.elements)])


def scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    """From a list at the root."""
    result = call.blank(call.elements)
    chunks = list(mine.split(call.elements)) if call.group.rank == call.root else None
    newest("scatter")(result, chunks, src=call.root)
    return result


def my_part_of_root(call: CollectiveCall) -> Want:
    """This rank's chunk of the root's."""
    start = call.group.rank * call.elements
    return _joined(call, [(call.root, start, start + call.elements)])


def all_to_all(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In one tensor, as mixtures of experts do."""
    result = call.blank(chunks(call))
    newest("all_to_all_single")(result, mine)
    return result


def my_part_of_all(call: CollectiveCall) -> Want:
    """This rank's chunk of every rank's values."""
    start = call.group.rank * call.elements
    return _joined(call, [(rank, start, start + call.elements) for rank in range(call.group.world)])


def _portion(call: CollectiveCall, sender: int, receiver: int) -> int:
    """How many elements one rank sends another in the uneven all_to_all: none, ``elements``, or twice that."""
    return (sender + 2 * receiver + 1) % 3 * call.elements


def uneven_length(call: CollectiveCall) -> int:
    """The length of the input of an uneven all_to_all."""
    return sum(_portion(call, call.group.rank, receiver) for receiver in range(call.group.world))


def all_to_all_uneven(call: CollectiveCall, mine: Buffer) -> Buffer:
    """With parts of three sizes, none at all among them."""
    rank, ranks = call.group.rank, range(call.group.world)
    sent, got = [_portion(call, rank, other) for other in ranks], [_portion(call, other, rank) for other in ranks]
    result = call.blank(sum(got))
    newest("all_to_all_single")(result, mine, got, sent)
    return result


def my_portion_of_all(call: CollectiveCall) -> Want:
    """This rank's portion of every rank's values."""
    parts = []
    for sender in range(call.group.world):
        start = sum(_portion(call, sender, earlier) for earlier in range(call.group.rank))
        parts.append((sender, start, start + _portion(call, sender, call.group.rank)))
    return _joined(call, parts)


def ring(call: CollectiveCall, mine: Buffer) -> Buffer:
    """To the next rank and from the one before, at once."""
    import torch.distributed as dist

    rank, world = call.group.rank, call.group.world
    result = call.blank(call.elements)
    sends = dist.P2POp(dist.isend, mine, (rank + 1) % world)
    takes = dist.P2POp(dist.irecv, result, (rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    return result


def of_the_one_before(call: CollectiveCall) -> Want:
    """The values of the rank before."""
    return _joined(call, [((call.group.rank - 1) % call.group.world, 0, call.elements)])


def partners(rank: int, world: int) -> tuple[int | None, ...]:
    """The rank that a rank exchanges with in each round of pairs, None for a round in which it waits."""
    found = []
    for pairs in spread_rounds(world) if world > 1 else ():
        mine = next((pair for pair in pairs if rank in pair), None)
        found.append(None if mine is None else mine[0] + mine[1] - rank)
    return tuple(found)


def pairs(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Send and receive with one rank after the other; the lower of two sends first, because two that both send first would
    wait for ever."""
    import torch.distributed as dist

    others = [other for other in partners(call.group.rank, call.group.world) if other is not None]
    result = call.blank(len(others) * call.elements)
    for other, part in zip(others, result.split(call.elements), strict=False):
        for sends in (call.group.rank < other, call.group.rank > other):
            dist.send(mine, other) if sends else dist.recv(part, other)
    return result


def of_partners(call: CollectiveCall) -> Want:
    """The values of the partner of each round."""
    others = partners(call.group.rank, call.group.world)
    return _joined(call, [(other, 0, call.elements) for other in others if other is not None])


def _joined(call: CollectiveCall, parts: list[tuple[int, int, int]]) -> Want:
    """The parts (rank, start, stop) of what the ranks send, one after the other."""
    import torch

    values = [call.sent(rank, start, stop) for rank, start, stop in parts]
    joined = torch.cat(values) if values else call.blank(0)
    return Want(values=joined, senders=tuple((rank, stop - start) for rank, start, stop in parts))
