"""What the trace commands print."""

import json
from pathlib import Path

from dsdoctor.overflow.frames.frame import Frame, Header, StepEnd
from dsdoctor.overflow.trace.compare import Pair, Side, compare
from dsdoctor.overflow.trace.headroom import headroom
from dsdoctor.overflow.trace.text import (
    comparison_lines,
    headroom_lines,
    shown_document,
    shown_document_end,
    shown_lines,
    source_lines,
)
from dsdoctor.overflow.trace.trace_file import RankTrace, Traces
from tests.overflow.on_disk import chain, header, step
from tests.overflow.written import backward, frame, tensor

NORM = frame(0, "h.0.norm", tensor("weight", absmax=1.0), tensor("input[0]"), tensor("output", posinf=1), batch=3)
GRADIENT = backward(1, "h.0.norm", tensor("grad output"), batch=3)


def compared(a: tuple[Frame, ...], b: tuple[Frame, ...], batch: int = 0) -> list[str]:
    pair = Pair(a=Side(rank=0, batch=0), b=Side(rank=0, batch=batch), frames_a=a, frames_b=b)
    return list(comparison_lines(compare([pair])))


def test_one_rank_is_shown_as_the_guide_does() -> None:
    assert list(shown_lines([(0, NORM), (0, GRADIENT), (0, step(3, overflow=True))], with_rank=False)) == [
        "",
        "",
        "                  *** Starting batch number=3 ***",
        "abs min  abs max  metadata",
        "                  h.0.norm Linear",
        "5.00e-01 1.00e+00 weight",
        "5.00e-01 3.00e+00 input[0]",
        "5.00e-01      inf output",
        "",
        "",
        "                  *** Backward of batch number=3 ***",
        "abs min  abs max  metadata",
        "                  h.0.norm Linear",
        "5.00e-01 3.00e+00 grad output",
        "                  *** Step 3 after batch 3: overflow, skipped ***",
    ]


def test_several_ranks_are_told_apart() -> None:
    heads = [line for line in shown_lines([(0, NORM), (5, NORM)], with_rank=True) if "***" in line]

    assert heads == [
        "                  *** Starting batch number=3 rank=0 ***",
        "                  *** Starting batch number=3 rank=5 ***",
    ]


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = frame(0, "h\x1b[2J\nx", tensor("output"))

    assert "                  h\\x1b[2J\\x0ax Linear" in list(shown_lines([(0, evil)], with_rank=False))


def test_the_document_is_written_piece_by_piece() -> None:
    traces = Traces(sources=(RankTrace(path=Path("a.jsonl"), header=header(2, 4)),))

    text = "".join(shown_document(traces, [(2, NORM), (2, StepEnd(step=1, batch=3))])) + shown_document_end(())

    document = json.loads(text)
    assert list(document) == ["schema", "command", "traces", "lines", "findings"]
    assert document["traces"][0]["header"]["world"] == 4
    assert [(line["rank"], *line.keys()) for line in document["lines"]] == [(2, "rank", "frame"), (2, "rank", "step")]
    assert document["lines"][0]["frame"]["tensors"][2]["posinf"] == 1


def test_who_wrote_the_traces() -> None:
    head = Header(schema="", dsdoctor="0.1", rank=0, world=2, host="node1", stage=1)
    sources = tuple(RankTrace(path=Path(name), header=head) for name in ("a", "b"))

    assert list(source_lines(Traces(sources=sources, notes=("the last line is torn",)), "A: ")) == [
        "A: a: rank 0 of 2, on node1, pipeline stage 1, dsdoctor 0.1 and 1 more of this run",
        "! the last line is torn",
    ]


def test_a_divergence_says_where_how_far_and_from_where() -> None:
    assert compared(chain(0, 2.0, 3.0), chain(0, 2.0, 60.0)) == [
        "✗ first divergence: h.1 Linear, output: abs max 3.00e+00 against 6.00e+01, a factor of 20 (rounding: up to 1.016)",
        "    forward of batch 0, rank 0; 5 of 6 tensors come before it and agree",
        "    its weights and inputs agree: it originated in this module",
        "  1 tensors diverge in all",
        "",
        "      ratio          A          B  of         module, tensor",
        "✗        20   3.00e+00   6.00e+01  abs max    h.1 Linear, output, batch 0",
    ]


def test_a_nan_says_how_many() -> None:
    bad = (frame(0, "h.0", tensor("weight", nan=3, neginf=1)),)

    assert compared((frame(0, "h.0", tensor("weight")),), bad, batch=1)[:3] == [
        "✗ first divergence: h.0 Linear, weight: 3.00e+00 against 3 nan and 1 inf",
        "    forward of batch 0, rank 0 against batch 1, rank 0; 0 of 1 tensors come before it and agree",
        "    it is a weight or buffer: it differed before the batch began",
    ]


def test_what_agrees_is_said_in_one_line() -> None:
    assert compared(chain(0, 2.0), chain(0, 2.0)) == ["✓ no divergence: 3 tensors in 1 batch agree"]


def test_what_only_one_side_has_is_named() -> None:
    assert compared(chain(0, 2.0, 3.0), chain(0, 2.0, dtype="float32"))[1:] == [
        "· float16 against float32: 3 tensors, first h.0 Linear, weight",
        "! only in A: h.1",
    ]


def test_headroom_ends_in_the_list_to_paste() -> None:
    lines = [(0, frame) for frame in chain(0, 10.0, 1e5, 4.0, dtype="bfloat16")]

    assert list(headroom_lines(headroom(lines))) == [
        "    bits   abs max   min > 0  dtype         module, tensor",
        "✗   -0.6  1.00e+05            bfloat16      h.1 Linear, output (batch 0, rank 0)",
        "✗   -0.6  1.00e+05            bfloat16      h.2 Linear, input[0] (batch 0, rank 0)",
        "✓   12.7  1.00e+01            bfloat16      h.0 Linear, output (batch 0, rank 0)",
        "✗ 2 of 3 modules do not fit float16 with 1 bit to spare, in 1 batch",
        "    Fix: run these in fp32",
        "      dsdoctor.keep_in_fp32(model, [",
        "          'h.1',",
        "          'h.2',",
        "      ])",
    ]


def test_a_run_that_fits_says_so() -> None:
    assert list(headroom_lines(headroom([(0, frame) for frame in chain(0, 10.0)])))[-1] == (
        "✓ all 1 modules fit float16 with 1 bit to spare, in 1 batch"
    )


def test_growth_and_gradients_are_told() -> None:
    frames = [frame for batch in range(9) for frame in chain(batch, 2.0**batch)]

    lines = list(headroom_lines(headroom([(0, frame) for frame in (*frames, GRADIENT)])))

    assert lines[2:4] == [
        "! h.0 doubles every 1 batches: at this pace it reaches 65504 in about 8 batches",
        "· gradients: the largest is 3.00e+00 in h.0.norm (batch 3, rank 0): a loss scale of up to 2^14 fits float16",
    ]
