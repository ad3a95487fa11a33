"""What became too small to count: verdicts from written figures, and updates of real weights."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from dsdoctor.core.finding import Severity
from dsdoctor.overflow.frames.first_bad import Flushed, Origin, RankReport, Vanished
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.underflow import all_zero, any_lost_activation, first_underflow, placed
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.findings import LocalFinding, among_all, judged
from dsdoctor.overflow.watch.history import WeightUpdates
from tests.overflow import engine as recorded
from tests.overflow.written import frame, good, rank_report, tensor

OVERFLOW = frame(1, "b", tensor("input[0]", absmax=62000.0), tensor("output", posinf=3))
BETWEEN = frame(1, "c", tensor("input[0]", nan=1), tensor("output", nan=8))


def flushed(share: float, fits: float = 2.0**14) -> RankReport:
    worst = (("a.weight", 0.97), ("b.weight", 0.4))
    return RankReport(rank=0, step=7, flushed=Flushed(share=share, worst=worst, scale=1.0, fits=fits))


def test_gradients_that_a_larger_scale_would_save_are_told_with_that_scale() -> None:
    (found,) = judge([flushed(0.6)])

    assert (found.rule, found.severity, found.affects) == ("gradients-underflow", Severity.WARNING, ("a.weight",))
    assert (
        found.title
        == "step 7: 60% of the gradient elements underflow in float16 at a loss scale of 2^0; a scale up to 2^14 fits"
    )
    assert found.fix is not None
    assert "loss_scale in the fp16 section to 16384," in found.fix.text


def test_gradients_that_are_all_zero_are_told_without_a_scale() -> None:
    (found,) = judge([flushed(1.0, fits=0.0)])

    assert (found.rule, found.severity) == ("gradients-underflow", Severity.WARNING)
    assert "every gradient is 0 in float16 at a loss scale of 2^0" in found.title
    assert found.fix is not None
    assert "raise loss_scale" in found.fix.text


def test_only_gradients_without_any_number_are_all_zero() -> None:
    engine = recorded.Engine(nn.Linear(2, 2), half=True)
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert all_zero(engine, Meters())

    engine.module.bias.grad[1] = 1e-30
    assert not all_zero(engine, Meters())


def test_a_few_elements_that_are_flushed_are_no_finding() -> None:
    assert judge([flushed(0.1)]) == ()


def test_where_no_scale_helps_another_format_is_advised() -> None:
    (found,) = judge([flushed(0.6, fits=1.0)])

    assert found.fix is not None
    assert found.fix.text.startswith("train in bfloat16")


def wide(name: str, **figures: float) -> TensorStats:
    return tensor(name, dtype="float32", **figures)


@pytest.mark.parametrize(
    ("narrow", "in_float32", "lost"),
    [
        ({"zeros": 8, "absmax": 0.0}, {"absmax": 1e-9}, True),
        ({"zeros": 5, "absmax": 6e-8}, {"absmax": 6e-8}, True),
        # dead units, dropout, a projection that begins with zeros: nothing in float32 too
        ({"zeros": 8, "absmax": 0.0}, {"zeros": 8, "absmax": 0.0}, False),
        # less precise and not gone
        ({"zeros": 2, "subnormal": 6, "absmax": 3e-5}, {"absmax": 3e-5}, False),
        # a few small ones beside large ones
        ({"zeros": 7, "absmax": 0.9}, {"absmax": 0.9}, False),
        # a closed gate
        ({"zeros": 8, "absmax": 0.0}, {"absmax": 1e-20}, False),
        ({"zeros": 8, "absmax": 0.0}, {"absmax": 1e-9, "nan": 1}, False),
    ],
)
def test_what_is_nothing_in_float16_and_something_in_float32_has_vanished(
    narrow: dict[str, float], in_float32: dict[str, float], lost: bool
) -> None:
    before, after = tensor("input[0]"), frame(2, "c", tensor("input[0]", zeros=8, absmax=0.0), tensor("output"))
    here = [frame(0, "a", before), frame(1, "b", before, tensor("output", **narrow)), after]
    there = [frame(0, "a", before), frame(1, "b", before, wide("output", **in_float32)), after]

    found = first_underflow(dict(placed(here)), dict(placed(there)))

    assert (found is not None and (found.frame.module, found.name)) == (("b", "output") if lost else False)
    assert any_lost_activation(here[:2]) is (narrow["absmax"] < 6e-5)


def test_an_activation_that_vanished_is_told_where_it_did_first() -> None:
    lost = [
        Vanished(frame=frame(order, "b.c", micro=1), name="output", share=1.0, largest=1e-9, dtype="float16")
        for order in (5, 3)
    ]
    reports = [RankReport(rank=rank, world=3, step=7, vanished=lost[rank] if rank < 2 else None) for rank in range(3)]

    (found,) = judge(reports)

    assert (found.rule, found.severity, found.affects) == ("activations-underflow", Severity.WARNING, ("b.c",))
    assert found.title == (
        "step 7: float16 flushes 100% of output of b.c (Linear) to zero; in float32 the largest is 1e-09, on ranks 0, 1 of 3"
    )
    assert found.evidence == ("micro-batch 1, rank 1: replayed in float16 and in float32",)


def test_a_value_that_came_from_another_rank_is_a_consequence() -> None:
    came = Origin(op="c10d.alltoall_base_", line="moe.py:3 in forward: dispatch(x)")
    bad = (tensor("a.weight", posinf=1),)
    reports = [
        rank_report(0, good(0, "a"), BETWEEN, received=came, local=bad),
        rank_report(1, good(0, "a"), OVERFLOW, local=bad),
    ]

    found = judge(reports)[0]

    assert found.title.endswith("on rank 1 of 2 only: its data, a branch that only it takes, or its hardware")
    assert "it reached rank 0 by c10d.alltoall_base_ in moe.py:3 in forward: dispatch(x)" in found.evidence
    assert "bad before reduction, on all 2 ranks" in found.evidence


def test_a_weight_that_was_gathered_is_bad_where_it_is_kept() -> None:
    bad = frame(0, "a", tensor("weight", posinf=1), tensor("input[0]"), tensor("output", nan=8))
    reports = [rank_report(0, bad), rank_report(1, bad, received=Origin(op="ZeRO-3", line=""))]

    assert judge(reports)[0].title.endswith(", in the part of it that rank 0 of 2 holds")


def test_what_a_rank_saw_alone_is_of_that_rank_and_survives_the_way_to_rank_0() -> None:
    alone = LocalFinding(
        RankReport(rank=1, world=2, step=4, losses=(float("nan"),), loss_line="train.py:9 in main: loss = f(x)"), False
    )
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(alone), type=LocalFinding)

    (found,) = judged(among_all([arrived]))

    assert found.rule == "loss-not-finite"
    assert "computed in train.py:9 in main: loss = f(x), on rank 1 of 2 only" in found.title


def test_a_bad_value_that_reaches_neither_loss_nor_gradient_is_a_note_and_nothing_to_fix() -> None:
    report = rank_report(0, good(0, "a"), OVERFLOW)

    (harmless,), (harmful,) = judged([LocalFinding(report, True)]), judged([LocalFinding(report, False)])

    assert (harmless.severity, harmless.fix, harmful.severity) == (Severity.NOTE, None, Severity.ERROR)
    assert "the loss and the gradients of the step are finite" in harmless.title


def test_a_folder_without_a_checkpoint_is_a_warning() -> None:
    (found,) = judge([RankReport(rank=0, not_loaded="/runs/7")])

    assert (found.rule, found.severity) == ("checkpoint-not-loaded", Severity.WARNING)
    assert "/runs/7" in found.title


def test_figures_that_could_not_be_read_are_no_finite_inputs() -> None:
    from dsdoctor.overflow.frames.frame import NOT_MEASURED, Other

    unread = frame(0, "a", Other(name="input[0]", what=NOT_MEASURED), tensor("output", posinf=1))  # type: ignore[arg-type]

    title = judge([rank_report(0, unread, unmeasured=("a.input[0]",))])[0].title

    assert "finite inputs" not in title
    assert "input[0] could not be measured" in title


class Engine:
    """As much of an engine as ``Updates`` reads."""

    def __init__(self, rate: float) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(32, 32).bfloat16()
        # torch's own takes a second to import
        self.optimizer = SimpleNamespace(param_groups=[{"params": list(self.module.parameters()), "lr": rate}])
        self.module(torch.randn(4, 32).bfloat16()).float().square().sum().backward()


def unchanged(rate: float) -> tuple[tuple[str, float], ...]:
    engine = Engine(rate)
    updates = WeightUpdates(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(parameter.grad, alpha=-rate)
    return updates.unchanged()


def test_updates_below_half_a_step_of_the_format_are_counted() -> None:
    assert [share > 0.9 for _, share in unchanged(1e-6)] == [True, True]
    assert unchanged(0.1) == ()


def test_a_learning_rate_of_nothing_is_no_lost_update() -> None:
    assert unchanged(0.0) == ()
