"""The command that says whether a run would fit another dtype."""

import math
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.trace.options import BatchList, Dtype, Files, Modules, RankList, check_dtype, selection_of, talk
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import flag, option
from dsdoctor.overflow.trace.headroom import headroom
from dsdoctor.overflow.trace.text import headroom_lines, source_parts
from dsdoctor.overflow.trace.trace_file import selected, sources


def headroom_command(
    *files: Files,
    dtype: Dtype = "float16",
    margin: Annotated[
        float,
        option(
            name="--margin",
            metavar="BITS",
            validator=Number(gte=0),
            help="Bits to leave free: 1 asks that all may double.",
        ),
    ] = 1.0,
    modules: Modules = (),
    batch: BatchList = None,
    rank: RankList = None,
    every: Annotated[bool, flag(name="--all", help="Every module, not only those with the least room.")] = False,
    as_json: Json = False,
) -> int:
    """Say whether this run would fit another dtype, such as a bf16 or fp32 run float16, and which modules would not.

    The largest value of every module over all batches and ranks, in bits below
    the dtype's limit; the modules to keep in fp32, to paste; with three batches
    or more, who grows and reaches the limit when.

    Example: dsdoctor trace headroom dsdoctor-trace --dtype float16
    """
    check_dtype(dtype)
    if not math.isfinite(margin):
        raise UsageError(f"--margin {margin} is no number of bits", hint="such as --margin 1")
    traces = sources(files)
    found = headroom(selected(traces, selection_of(modules, batch, rank, "all")), dtype=dtype, margin=margin)
    if not found.modules:
        raise UsageError("nothing fits these filters: no forward call was read", hint="dsdoctor trace show")
    if not as_json:
        talk(traces)
    parts = {"traces": source_parts(traces), "headroom": found}
    print_result("trace headroom", as_json, headroom_lines(found, every=every), (), **parts)
    return FOUND if found.keep else OK
