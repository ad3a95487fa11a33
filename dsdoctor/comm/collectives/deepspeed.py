"""The collectives that ZeRO uses, through deepspeed.comm, with values. Compiles nothing.

On a CPU DeepSpeed compiles deepspeed_shm_comm at its start, which takes minutes, and a process that is killed meanwhile leaves a
lock behind for which every later start waits for ever. Only `inference_all_reduce` uses that op, so it is left out here.
"""

from typing import Any

from dsdoctor.comm.collectives import calls
from dsdoctor.comm.collectives.calls import Buffer
from dsdoctor.comm.collectives.catalogue import DTYPES, ODD, Collective, ExchangeStep
from dsdoctor.comm.collectives.exchange import Progress
from dsdoctor.comm.collectives.run import run_steps
from dsdoctor.comm.collectives.values import CollectiveCall, Reduction
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange

COMPILED_AT_START = "deepspeed_shm_comm"


def run_layer(group: RankGroup, progress: Progress) -> tuple[Exchange, ...]:
    """Start DeepSpeed's layer on the group that is there, then all_reduce, all_gather and reduce_scatter through it, with values.

    Importing deepspeed prints. Raises what it raises.
    """
    progress.tell(0, "importing deepspeed")
    import deepspeed

    # deepspeed/comm/torch.py, build_shm_op: an op that is not compatible is neither compiled nor loaded
    deepspeed.ops.__compatible_ops__[COMPILED_AT_START] = False

    progress.tell(0, "deepspeed.init_distributed")
    deepspeed.init_distributed(dist_backend=group.backend, auto_mpi_discovery=False, verbose=False)
    found = [collective for collective in LAYER if group.world >= collective.least]
    elements = max(ODD // group.world, 1) | 1
    return run_steps(
        group,
        [ExchangeStep(collective=collective, dtype=kind, elements=elements) for collective in found for kind in DTYPES],
        progress,
    )


def _layer() -> Any:
    import deepspeed.comm

    return deepspeed.comm


def _all_reduce(call: CollectiveCall, mine: Buffer) -> Buffer:
    _layer().all_reduce(mine, op=calls.operator(call))
    return mine


def _all_gather(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements * call.group.world)
    _layer().allgather_fn(result, mine)
    return result


def _reduce_scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements)
    _layer().reduce_scatter_fn(result, mine, op=calls.operator(call))
    return result


LAYER = (
    Collective(
        name="deepspeed all_reduce",
        run=_all_reduce,
        expect=calls.reduced,
        reduction=Reduction.SUM,
        in_place=True,
    ),
    Collective(name="deepspeed all_gather", run=_all_gather, expect=calls.of_all),
    Collective(
        name="deepspeed reduce_scatter",
        run=_reduce_scatter,
        expect=calls.my_part_reduced,
        length=calls.chunks,
        reduction=Reduction.SUM,
    ),
)
