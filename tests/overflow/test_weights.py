"""A weight that became bad: what the optimizer shows of it, and what is told to do about it."""

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.hooks.engine import Decision
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch import decisions
from dsdoctor.overflow.watch.decisions import Decisions
from dsdoctor.overflow.watch.findings import Announcer
from dsdoctor.overflow.watch.history import OverflowCount, is_frozen, zero_over_zero
from dsdoctor.rules.book import words_of
from tests.each import each
from tests.overflow.engine import Engine
from tests.overflow.written import frame, rank_report, tensor

BY_EPS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


def stepped(kind: Any, dtype: torch.dtype, eps: float, planted: int = 0) -> Any:
    """An engine whose optimizer has stepped once, with a gradient of 0 in half of the weights; ``planted``: of the others so many
    were made nan by something else."""
    weight = nn.Parameter(torch.ones(6, dtype=dtype))
    optimizer = kind([weight], lr=1e-3, eps=eps)
    weight.grad = torch.tensor([0, 0, 0, 1, 1, 1], dtype=dtype)
    optimizer.step()
    weight.data[6 - planted :] = float("nan")
    return SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer), module=nn.Linear(2, 2))


@each("kind, dtype", itertools.product(BY_EPS, (torch.float32, torch.bfloat16)))
def test_an_eps_of_0_and_a_second_moment_of_0_are_proven_for_every_bad_element(kind: Any, dtype: torch.dtype) -> None:
    assert zero_over_zero(stepped(kind, dtype, 0.0)) == 3
    assert zero_over_zero(stepped(kind, dtype, 0.0, planted=1)) == 0, "one of them came from elsewhere"
    assert zero_over_zero(stepped(kind, dtype, 1e-8)) == 0
    assert zero_over_zero(stepped(kind, dtype, 1e-8, planted=2)) == 0


def test_an_eps_that_is_0_in_the_format_of_the_weights_counts_as_0() -> None:
    engine = stepped(torch.optim.Adam, torch.float16, 0.0)
    for group in engine.optimizer.optimizer.param_groups:
        group["eps"] = 1e-8

    assert zero_over_zero(engine) == 3


def test_an_optimizer_without_eps_or_without_a_state_shows_nothing() -> None:
    weight = nn.Parameter(torch.full((3,), float("nan")))

    for optimizer in (torch.optim.SGD([weight], lr=1.0), torch.optim.Adam([weight], eps=0.0)):
        assert zero_over_zero(SimpleNamespace(optimizer=optimizer)) == 0


def test_a_frozen_weight_is_one_without_gradient() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    engine = SimpleNamespace(module=module)

    assert [is_frozen(engine, name) for name in ("weight", "bias", "of.another")] == [False, True, False]


def weight_told(*more: dict[str, Any], **counts: int) -> Finding:
    bad = frame(0, "a", tensor("weight", **(counts or {"nan": 2})), tensor("output", nan=8))
    return judge([rank_report(rank, bad, world=len(more), **each) for rank, each in enumerate(more)])[0]


def words(case: str) -> str:
    """What the fix of a case begins with, up to its first value."""
    return str(words_of("weight-not-finite", case)["fix"]).partition("{")[0]


@each(
    "known, case, values",
    [
        ({}, "before-the-watch", ()),
        ({"weight_bad_since": 4}, "optimizer", ("step 3",)),
        ({"weight_bad_since": 4, "zero_over_zero": 9}, "eps", ("step 3",)),
        ({"weight_bad_since": 4, "frozen": True}, "frozen", ("step 3",)),
        ({"frozen": True}, "before-the-watch", ()),
        ({"bad_applied": 2}, "bad-step", ("step 2",)),
        ({"weight_bad_since": 4, "bad_applied": 4}, "bad-step", ("step 4",)),
        ({"weight_bad_since": 6, "bad_applied": 2}, "optimizer", ("step 5",)),
        ({"bad_applied": 9}, "before-the-watch", ()),
        ({"evaluation": "an evaluation"}, "evaluation", ()),
    ],
)
def test_what_is_told_to_do_about_a_bad_weight_fits_what_can_have_written_it(
    known: dict[str, Any], case: str, values: tuple[str, ...]
) -> None:
    found = weight_told(known, known)

    assert found.fix is not None
    assert found.fix.text.startswith(words(case))
    assert all(value in found.fix.text for value in values)


@each(
    "bad, reported",
    [
        ((1,), {1: None}),
        ((1, 2, 3), {1: None, 2: 1, 3: 1}),
        ((1, 5), {1: None, 5: None}),
        ((1, 5, 6), {1: None, 5: None, 6: 5}),
    ],
)
def test_a_bad_step_that_was_applied_is_reported_until_a_step_is_clean(
    bad: tuple[int, ...], reported: dict[int, int | None]
) -> None:
    told: dict[int, int | None] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "any_bad_gradient", lambda *_: step in bad)
        patch.setattr(Decisions, "_look_for_small", lambda *_: None)
        patch.setattr(Decisions, "_rank_report", lambda _, decision: RankReport(rank=0, step=decision.step))
        patch.setattr(OverflowCount, "is_replayed", lambda *_, **__: False)
        patch.setattr(Decisions, "_conclude", lambda _, reports: told.update({reports[0].step: reports[0].bad_applied}))
        watch: Any = Decisions(Engine(nn.Linear(2, 2)), Options(), Announcer(), SimpleNamespace(batches=[]))
        watch._history = SimpleNamespace(note_rates=lambda _: None)
        for step in range(8):
            watch.on_decision(
                Decision(overflow=None, replicated=True, loss_scale=1.0, floor=None, dynamic=False, step=step)
            )

    assert told == reported


def test_a_weight_that_became_inf_has_grown() -> None:
    found = weight_told({"weight_bad_since": 4}, posinf=2)

    assert found.fix is not None
    assert found.fix.text.startswith(words(""))


@each("step, said", [(2, "no weight has changed yet"), (3, "since step 0"), (7, "since step 4")])
def test_steps_that_were_skipped_from_the_first_on_have_no_step_before(step: int, said: str) -> None:
    (found,) = judge([RankReport(rank=0, step=step, skipped=3)])

    assert said in found.title
    assert "-1" not in found.title


def test_a_step_that_is_not_replayed_any_more_has_no_new_cause() -> None:
    bad = (tensor("a.weight", nan=1),)

    found = judge([RankReport(rank=0, losses=(float("nan"),), named=bad, again=True)])[0]

    assert found.fix is not None
    assert found.rule == "loss-not-finite"
    assert found.fix.text.startswith("see the findings of earlier steps")


@each("dtype", ["float32", "bfloat16", "float16"])
def test_what_went_wrong_in_an_evaluation_is_told_so_and_mended_there(dtype: str) -> None:
    bad = frame(1, "b", tensor("input[0]", dtype), tensor("output", dtype, nan=4))

    found = judge([rank_report(0, bad, replayed="", dtype=dtype, evaluation="an evaluation", named=())])[0]

    assert found.fix is not None
    assert ", in an evaluation" in found.title
    assert found.evidence[0] == "an evaluation after 7 steps, batch_number=0, rank 0"
    assert "learning rate" not in found.fix.text


@each(
    "accumulation, micro, word",
    [(0, 2, "micro-batch 2"), (1, 0, "micro-batch 0"), (1, 2, "forward 2"), (4, 2, "micro-batch 2")],
)
def test_a_forward_more_than_a_step_has_micro_batches_is_none(accumulation: int, micro: int, word: str) -> None:
    bad = frame(1, "b", tensor("input[0]"), tensor("output", nan=4), micro=micro)

    assert judge([rank_report(0, bad, accumulation=accumulation)])[0].evidence[0].startswith(f"step 7, {word}, ")


def test_one_of_several_engines_is_told_by_its_model_and_its_first_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_watched", [])
    first, second = (Engine(nn.Sequential(nn.Linear(2, size))) for size in (3, 5))
    for engine in (first, first):
        decisions.register(engine)
    assert decisions.engine_label(first) == ""
    decisions.register(second)

    assert decisions.engine_label(first) == "Sequential, 0.weight 3x2, 1 of 2 in this process"
    assert decisions.engine_label(second) == "Sequential, 0.weight 5x2, 2 of 2 in this process"
    del first, engine
    gc.collect()
    assert decisions.engine_label(second) == ""
