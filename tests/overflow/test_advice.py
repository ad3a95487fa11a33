"""Advice: only what was tried is called checked, a weight that grew is told with its pace, rows and labels by their places."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsdoctor.overflow.frames.first_bad import BadKind, Cure, Growth, Origin, RankReport, Scale, Tried
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.provenance import ignored_labels, rows_of, rows_text
from dsdoctor.overflow.replay.remedy import candidate_modules
from dsdoctor.overflow.verdict.evidence import cure_text, joined, what_was_tried
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.history import MAX_POINTS, InputSizes, LearningRates, WeightSizes
from tests.overflow.written import backward, frame, good, rank_report, tensor

OVERFLOW = frame(1, "b.c", tensor("input[0]", absmax=62000.0), tensor("output", posinf=3))


def reports(*by_rank: tuple[Tried, ...], **more: Any) -> list[RankReport]:
    return [rank_report(rank, good(0, "a"), OVERFLOW, tried=tried, **more) for rank, tried in enumerate(by_rank)]


def attempt(module: str, *, forward: bool = True, backward: bool | None = True, why_not: str = "") -> Tried:
    return Tried(module=module, forward=forward, backward=backward, why_not=why_not)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (
            (attempt("b.c", forward=False), attempt("b")),
            (attempt("b.c"), attempt("b")),
            "Run it in float32: dsdoctor.fp32_forward(model.get_submodule(\"b\")) (checked: with float32 in b this batch is "
            "finite).",
        ),
        ((attempt(""),), (attempt("", backward=None),), "Run it in float32: dsdoctor.fp32_forward(model) (checked: with "
         "float32 in the whole model this batch has a finite forward)."),
        (
            (attempt("b.c", backward=False), attempt("")),
            (attempt("b.c"), attempt("", forward=False)),
            "Float32 does not help (checked in b.c and in the whole model): this batch is not finite there either.",
        ),
        ((attempt("b", forward=False), attempt("", forward=False, why_not="ValueError")), (attempt("b"), attempt("")), ""),
        ((), (), ""),
    ],
)  # fmt: skip
def test_a_remedy_counts_only_where_every_rank_was_finite_with_it(
    mine: tuple[Tried, ...], theirs: tuple[Tried, ...], said: str
) -> None:
    told = tuple(reports(mine, theirs))

    assert what_was_tried(told, told[0].first_bad) == said


@pytest.mark.parametrize("kept", [False, True])
def test_a_finite_forward_is_no_remedy_where_the_forward_was_finite_anyway(kept: bool) -> None:
    """A loss that the script made nan: its gradient begins as nan, and what float32 does to it cannot be tried."""
    began = backward(2, "", tensor("grad output.loss", nan=1))
    tried = (attempt("", backward=True if kept else None),)
    told = tuple(rank_report(rank, good(0, "a"), began, tried=tried) for rank in range(2))
    found = told[0].first_bad

    assert found is not None and found.kind is BadKind.GRADIENT
    assert bool(what_was_tried(told, found)) is kept
    assert bool(what_was_tried(told, None)) is kept


def test_what_was_tried_stands_in_the_fix_after_the_cure_of_the_operation() -> None:
    line = Origin(op="aten.div", line="m.py:3 in forward: x / y", how="0 / 0: its divisor is 0", cure=Cure("divisor"))
    (found, *_) = judge(reports((attempt("b.c"),), origin=line))

    assert "why: 0 / 0: its divisor is 0" in found.evidence
    assert found.fix is not None
    assert found.fix.text.startswith(f"{cure_text(Cure('divisor'))} Run it in float32: ")


def test_a_weight_whose_parts_lie_on_two_ranks_grew_as_the_larger_part_did() -> None:
    parts = [((0, 1.0), (7, 2.0)), ((0, 0.5), (7, 40.0))]
    told = [
        rank_report(rank, good(0, "a"), OVERFLOW, growth=(Growth(name="b.c.weight", points=points),))
        for rank, points in enumerate(parts)
    ]
    (found, *_) = judge(told)

    assert joined(tuple(told)) == (Growth(name="b.c.weight", points=((0, 1.0), (7, 40.0))),)
    assert "b.c.weight grew 40 times from step 0 (largest 1) to step 7 (40), 1.7 times a step" in found.evidence
    assert found.fix is not None
    assert found.fix.text == "b.c.weight has grown since step 0: lower the learning rate, or clip gradients."


def test_the_sizes_of_weights_are_kept_in_bounds_and_the_first_stays() -> None:
    engine = SimpleNamespace(module=nn.Sequential(nn.Linear(2, 2)))
    sizes = WeightSizes()
    for step in range(100):
        with torch.no_grad():
            engine.module[0].weight.fill_(1.0 + step)
        sizes.note(engine, step)
    found = SimpleNamespace(frame=SimpleNamespace(module="0"))
    growth = {each.name: each.points for each in sizes.of(engine, found, 100, Meters())}  # type: ignore[arg-type]

    assert growth["0.weight"][0] == (0, 1.0)
    assert growth["0.weight"][-1] == (100, 100.0)
    assert len(growth["0.weight"]) <= MAX_POINTS + 1


def test_a_learning_rate_that_jumps_is_noted_and_a_warmup_from_nothing_is_not() -> None:
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]))
    rates = LearningRates()
    for step, rate in enumerate((0.0, 1e-5, 2e-5, 3e-5, 3e-3, 3e-3)):
        engine.optimizer.param_groups[0]["lr"] = rate
        rates.note(engine, step)

    assert rates.jumps() == ((4, 3e-5, 3e-3),)


def test_a_learning_rate_that_is_no_number_is_noted_whichever_group_has_it() -> None:
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.1}]))
    rates = LearningRates()
    for step, rate in enumerate((0.1, float("nan"), float("nan"))):
        engine.optimizer.param_groups[1]["lr"] = rate
        rates.note(engine, step)

    assert [(step, before, str(since)) for step, before, since in rates.jumps()] == [(1, 0.1, "nan")]


def test_what_a_module_was_given_grew_or_did_not() -> None:
    sizes = InputSizes()
    for step, value in ((0, 1.0), (1, 2.0), (3, 8.0)):
        sizes.note(step, (frame(0, "a", tensor("input[0]", absmax=value)), good(1, "b")))
    found = rank_report(0, frame(0, "a", tensor("input[0]", absmax=32.0), tensor("output", posinf=1))).first_bad
    assert found is not None

    grown = sizes.of(found, 5)
    evidence = judge([rank_report(0, OVERFLOW, inputs=grown)])[0].evidence

    assert "input[0] of a grew 32 times from step 0 (largest 1) to step 5 (32), 2 times a step" in evidence
    # nothing is said of what was not seen before
    assert InputSizes().of(found, 5) == ()


def test_only_rows_that_are_bad_are_named() -> None:
    x = torch.zeros(3, 4, 5)
    x[1, 2, 3] = float("nan")
    mask = torch.full((3, 4), float("-inf"))

    assert rows_of(({"x": x}, torch.zeros(3, 7))) == 3
    assert rows_of((x, torch.zeros(4, 7))) is None
    assert (
        rows_text("in the batch", [x, mask], 3) == "in the batch: only row 1 of 3 (first dimension, from 0) not finite"
    )
    assert rows_text("in the batch", [x.fill_(float("nan"))], 3) == ""


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([[-100, -100]], "all 2 elements of labels are -100"),
        ([[5, -100]], "all elements of labels but the first of each row are -100"),
        ([[-100, 5]], ""),
    ],
)
def test_labels_that_do_not_count_are_told(labels: list[list[int]], said: str) -> None:
    assert ignored_labels({"labels": torch.tensor(labels), "input_ids": torch.tensor([[-100]])}).startswith(said)
    assert said or not ignored_labels({"labels": torch.tensor(labels)})


def test_float32_is_tried_from_the_inside_out_and_never_in_a_list_of_modules() -> None:
    model = nn.Sequential(nn.ModuleDict({"x": nn.ModuleList([nn.Sequential(nn.Linear(1, 1))])}))
    inner = frame(0, "0.x.0.0", tensor("input[0]"), tensor("output", posinf=1))
    found = rank_report(0, inner).first_bad

    assert found is not None
    assert candidate_modules(model, found) == ("0.x.0.0", "0.x.0", "")


def test_a_sum_over_the_ranks_that_does_not_fit_is_no_ranks_fault() -> None:
    came = Origin(op="c10d.allreduce_", line="m.py:3 in forward: all_reduce(x)")
    both = [rank_report(rank, good(0, "a"), OVERFLOW, received=came, world=2) for rank in range(2)]
    words = (
        "every rank gave finite values to c10d.allreduce_ in m.py:3 in forward: all_reduce(x), and got this result: "
        "their sum does not fit"
    )

    assert words in judge(both)[0].evidence
    assert words not in judge([both[0], rank_report(1, good(0, "a"), OVERFLOW, world=2)])[0].evidence


@pytest.mark.parametrize("kind", ["module", "gradient"])
@pytest.mark.parametrize("points", [((0, 1e37),), ((0, 1e37), (7, 1e37)), ((0, 0.5), (7, 0.6))])
def test_a_weight_that_was_extreme_from_the_start_is_named_in_the_advice(
    kind: str, points: tuple[tuple[int, float], ...]
) -> None:
    growth = (Growth(name="embed.weight", points=points),)
    bad = OVERFLOW if kind == "module" else backward(1, "b.c", tensor("grad output", nan=1))
    fails = (attempt("", forward=kind == "gradient", backward=False),)
    (found,) = judge(
        [
            rank_report(
                0, good(0, "a"), bad, tried=fails, growth=growth, dtype="bfloat16", scale=Scale(), local=bad.tensors
            )
        ]
    )

    assert found.fix is not None
    assert ("embed.weight holds values up to 1e+37" in found.fix.text) is (points[0][1] > 1)


def test_extreme_weights_are_read_of_the_whole_model() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[0].weight.data[2, 1] = -1e37
    engine = SimpleNamespace(module=model)
    sizes = WeightSizes()
    sizes.note(engine, 0)

    (found,) = sizes.extreme(engine, 3, Meters())

    assert (found.name, [step for step, _ in found.points]) == ("0.weight", [0, 3])
    assert found.points[-1][1] == pytest.approx(1e37)
