"""Written-out reports of ranks -> the verdict: the cause, who shares it, and what to do."""

import pytest

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import Cure, Origin, RankReport, Scale
from dsdoctor.overflow.verdict.evidence import cure_text
from dsdoctor.overflow.verdict.verdict import judge
from tests.overflow.written import backward, frame, good, rank_report, tensor

OVERFLOW = frame(1, "b", tensor("input[0]", absmax=62000.0), tensor("output", posinf=3))
BETWEEN = frame(1, "b", tensor("input[0]", nan=1), tensor("output", nan=8))
GRADIENT = backward(2, "a", tensor("grad output", posinf=5), after=("b",))
NAMED = (tensor("a.weight", posinf=1), tensor("b.weight", nan=2))
UNSCALED = {"dtype": "bfloat16", "scale": Scale()}


def cause(*rank_reports: RankReport) -> Finding:
    return judge(rank_reports)[0]


def test_an_operation_that_overflowed_is_named_with_its_figures_and_its_remedy() -> None:
    found = cause(rank_report(0, good(0, "a"), OVERFLOW))

    assert found.rule == "overflow-in-module"
    assert (
        found.title
        == "b (Linear) made 3 inf of 8 in output from finite inputs (largest 6.2e+04; the float16 limit is 6.55e+04)"
    )
    assert "step 7, micro-batch 0, batch_number=0, rank 0" in found.evidence
    assert "its inputs had 0.1 bits of headroom left" in found.evidence
    assert found.fix is not None
    assert found.fix.text == (
        "run it in float32, with what is around b: dsdoctor.fp32_forward(model). Or train in bfloat16"
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((0, 1, 2, 3), "on all 4 ranks: the model or the data"),
        ((3,), "on rank 3 of 4 only: its data, a branch that only it takes, or its hardware"),
        ((1, 2), "on ranks 1, 2 of 4"),
    ],
)
def test_who_shares_it_tells_the_model_from_data_and_hardware(bad: tuple[int, ...], said: str) -> None:
    rank_reports = [rank_report(rank, good(0, "a"), OVERFLOW if rank in bad else good(1, "b")) for rank in range(4)]

    assert cause(*rank_reports).title.endswith(said)


def test_two_ranks_that_overflow_in_different_modules_are_the_model_and_no_hardware() -> None:
    other = rank_report(1, good(0, "a"), good(1, "b"), frame(2, "c", tensor("input[0]"), tensor("output", posinf=1)))

    assert cause(rank_report(0, good(0, "a"), OVERFLOW), other).title.endswith("on all 2 ranks: the model or the data")


def test_ranks_in_any_order_give_the_same_verdict() -> None:
    rank_reports = [rank_report(rank, good(0, "a"), OVERFLOW) for rank in range(3)]

    assert judge(rank_reports) == judge(reversed(rank_reports))


def test_the_first_in_time_is_the_cause_whichever_rank_saw_it() -> None:
    early = rank_report(1, frame(0, "a", tensor("input[0]"), tensor("output", nan=1)))
    late = rank_report(0, good(0, "a"), OVERFLOW)

    assert cause(late, early).title.startswith("a (Linear)")


def test_in_a_pipeline_the_lowest_stage_goes_first() -> None:
    first = rank_report(0, good(0, "a"), good(1, "c"), frame(2, "d", tensor("output", nan=1)), stage=0)
    second = rank_report(1, frame(0, "e", tensor("input[0]", nan=1)), stage=1)

    assert cause(second, first).title.startswith("d (Linear)")


def test_in_the_backward_of_a_pipeline_the_highest_stage_goes_first() -> None:
    first = rank_report(
        0, good(0, "a"), backward(1, "a", tensor("grad output", nan=1)), named=NAMED, stage=0, **UNSCALED
    )
    second = rank_report(
        1, good(0, "e"), backward(1, "e", tensor("grad output", nan=1)), named=NAMED, stage=1, **UNSCALED
    )

    assert "in the gradient of e (Linear) output" in cause(first, second).title


def test_what_a_function_made_is_between_two_modules_with_its_line() -> None:
    line = Origin(op="aten.log", line="model.py:12 in forward: h = x.log()")
    found = cause(rank_report(0, good(0, "a"), BETWEEN, origin=line))

    assert found.rule == "overflow-between-modules"
    assert found.title == (
        "1 nan of 8 first appeared between a (Linear) and b (Linear), by aten.log in model.py:12 in forward: h = x.log()"
    )


def test_the_batch_itself() -> None:
    root = frame(1, "", tensor("input[0]", nan=1))
    found = cause(rank_report(0, frame(0, "a", tensor("input[0]", nan=1), tensor("output", nan=8)), root))

    assert found.rule == "nan-in-the-batch"


def test_a_weight_is_named_in_full_with_the_step_since_which_it_is_bad() -> None:
    bad = frame(0, "a", tensor("weight", nan=1), tensor("output", nan=8))
    found = cause(rank_report(0, bad, weight_bad_since=5))

    assert found.title == "the weight a.weight holds 1 nan of 8, since step 5"


def test_a_weight_that_a_learning_rate_of_nan_made_bad_is_told_with_it() -> None:
    bad = frame(0, "a", tensor("weight", nan=8), tensor("output", nan=8))
    found = cause(rank_report(0, bad, weight_bad_since=5, rates=((4, 1e-4, float("nan")),)))

    assert "the learning rate went from 0.0001 to nan in step 4" in found.evidence
    assert found.fix is not None
    assert found.fix.text.startswith("fix what made the learning rate nan in step 4")


@pytest.mark.parametrize("since", [None, 3])
def test_a_learning_rate_that_became_nan_after_the_weight_did_not_make_it_bad(since: int | None) -> None:
    bad = frame(0, "a", tensor("weight", nan=8), tensor("output", nan=8))
    found = cause(rank_report(0, bad, weight_bad_since=since, rates=((4, 1e-4, float("nan")),)))

    assert found.fix is not None
    assert "the learning rate nan" not in found.fix.text


IN_THE_GRAPH = Origin(op="log", line="", how="the logarithm of 0: it was given 2 zeros", cure=Cure("domain"))


def test_the_operation_that_the_graph_of_a_loss_shows_is_told_with_its_statement_and_its_cure() -> None:
    statement = "train.py:9 in main: loss = f(model(x))"

    found = cause(rank_report(0, good(0, "a"), losses=(float("nan"),), loss_made=IN_THE_GRAPH, loss_line=statement))

    assert found.title == f"the loss is nan and every module's output is finite, by log, computed in {statement}"
    assert "why: the logarithm of 0: it was given 2 zeros" in found.evidence
    assert "read from the graph of the loss; if it happens again, its line is reported" in found.evidence
    assert found.affects == ()
    assert found.fix is not None
    assert found.fix.text == cure_text(Cure("domain"))


def test_an_operation_whose_line_is_known_is_another_finding_than_one_without() -> None:
    with_line = Origin(op="log", line="train.py:3 in f: return p.log()", how=IN_THE_GRAPH.how)

    found = cause(rank_report(0, good(0, "a"), losses=(float("nan"),), loss_made=with_line, loss_line="train.py:9"))

    assert found.title.endswith(", by log in train.py:3 in f: return p.log()")
    assert found.affects == ("the loss",)
    assert found.fix is not None
    assert found.fix.text == "Check that operation and its inputs."


def test_the_graph_of_a_step_that_is_not_replayed_any_more_is_not_told() -> None:
    found = cause(RankReport(rank=0, losses=(float("nan"),), named=NAMED, again=True, loss_made=IN_THE_GRAPH))

    assert "log" not in found.title
    assert found.fix is not None
    assert found.fix.text.startswith("see the findings of earlier steps")


def test_a_loss_that_is_nan_over_a_finite_forward() -> None:
    found = cause(rank_report(0, good(0, "a"), losses=(float("nan"),)), rank_report(1, good(0, "a"), losses=(0.5,)))

    assert found.rule == "loss-not-finite"
    assert "on rank 0 of 2 only" in found.title


def test_a_loss_that_is_nan_without_a_replay_is_told_with_what_the_model_holds() -> None:
    held = (tensor("buffer position", nan=8),)
    found = cause(rank_report(0, losses=(float("nan"),), replayed="", bad_tensors=held))

    assert found.rule == "loss-not-finite"
    assert "the buffer position holds 8 nan of 8" in found.evidence
    assert found.fix is not None
    assert found.fix.text.startswith("check whether the forward reads the buffer position.")


@pytest.mark.parametrize(
    ("absmax", "told"),
    [
        (8.0, "the largest at scale 1 is 8, so it fits up to 2^12"),
        (0.5, "at scale 1 it's at most 0.5, which fits: it overflows within the backward or in the sum over the ranks"),
    ],
)
def test_a_gradient_above_the_scale_is_one_quiet_note_with_what_would_fit(absmax: float, told: str) -> None:
    small = (tensor("a.weight", absmax=absmax),)
    found = cause(rank_report(0, good(0, "a"), GRADIENT, named=NAMED, local=NAMED, at_scale_one=small))

    assert found.severity is Severity.NOTE
    assert (
        found.title == f"step 7 skipped: the gradient of a.weight, b.weight overflows at a loss scale of 2^16; {told}"
    )


def test_a_gradient_that_stays_bad_at_scale_one_is_an_error_with_its_operation() -> None:
    line = Origin(op="SqrtBackward0", line="model.py:9 in forward: y = x.sqrt()")
    still = (tensor("a.weight", nan=1),)
    found = cause(rank_report(0, good(0, "a"), GRADIENT, named=NAMED, local=NAMED, at_scale_one=still, origin=line))

    assert found.rule == "gradient-stays-at-scale-one"
    assert found.title == (
        "SqrtBackward0 of model.py:9 in forward: y = x.sqrt() made 5 inf of 8 in the gradient of a (Linear) output, "
        "out of the backward of b, even at a loss scale of 1; the forward is finite"
    )


def test_without_a_loss_scale_a_bad_gradient_is_an_error_at_once() -> None:
    found = cause(rank_report(0, good(0, "a"), GRADIENT, named=NAMED, local=NAMED, **UNSCALED))

    assert found.rule == "gradient-stays-at-scale-one"


def test_an_overflow_that_the_replay_does_not_show_again() -> None:
    found = cause(rank_report(0, good(0, "a"), named=NAMED, **UNSCALED))

    assert found.rule == "overflow-not-reproduced"
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize("more", [{}, UNSCALED])
def test_a_loss_that_is_finite_in_the_replay_is_not_explained_by_it(more: dict[str, object]) -> None:
    lost = {"losses": (float("nan"),), "bad_output": True, "other_loss": True}
    found = cause(rank_report(0, good(0, "a"), named=NAMED, **lost, **more))

    assert (found.rule, found.severity) == ("overflow-not-reproduced", Severity.WARNING)


def test_finite_gradients_whose_norm_is_not() -> None:
    found = cause(rank_report(0, good(0, "a"), local=(tensor("a.weight", "float32", 1e20),), **UNSCALED))

    assert found.title == "step 7: every gradient is finite but their norm is not: a.weight has 1e+20"


def test_without_a_replay_the_names_are_all_that_is_said() -> None:
    found = cause(rank_report(0, named=NAMED, replayed="", **UNSCALED))

    assert (found.rule, found.title) == (
        "gradient-not-finite",
        "step 7: the gradient of a.weight, b.weight is not finite",
    )


def test_a_step_that_is_applied_all_the_same_is_said_beside_the_cause() -> None:
    rules = [finding.rule for finding in judge([rank_report(0, good(0, "a"), OVERFLOW, applied=True, **UNSCALED)])]

    assert rules == ["overflow-in-module", "bad-step-applied"]


@pytest.mark.parametrize(("dtype", "skipped", "said"), [("float16", 30, 0), ("float16", 31, 1), ("bfloat16", 3, 1)])
def test_steps_skipped_in_a_row_matter_when_it_is_no_search_any_more(dtype: str, skipped: int, said: int) -> None:
    rules = [finding.rule for finding in judge([rank_report(0, good(0, "a"), OVERFLOW, skipped=skipped, dtype=dtype)])]

    assert rules.count("steps-skipped-in-a-row") == said


@pytest.mark.parametrize(("seen", "said"), [(1.0, ["loss-not-scaled"]), (65536.0, [])])
def test_a_loss_that_was_not_scaled(seen: float, said: list[str]) -> None:
    told = rank_report(0, replayed="", zero_stage=0, loss_gradient=seen, loss_gradient_due=65536.0)

    assert [finding.rule for finding in judge([told])] == said


def test_a_healthy_account_gives_no_verdict() -> None:
    assert judge([rank_report(0, good(0, "a"), replayed="")]) == ()
