"""What lies in a buffer, a weight or an attribute of a model is told from what an operation made, wherever the model keeps it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hooks, Position
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.investigate import ReplayObservations, look_at
from dsdoctor.overflow.replay.operations import Operations, PlacedReadings
from dsdoctor.overflow.replay.provenance import History, bad_tensors, names_of
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.debug import DebugUnderflowOverflow

WIDTH = 4
NAN, INF = float("nan"), float("inf")


class Inner(nn.Module):
    """One of everything that a module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.ones(WIDTH))
        self.register_buffer("fleeting", torch.ones(WIDTH), persistent=False)
        self.register_buffer("packed", torch.ones(WIDTH, dtype=torch.int8))
        self.register_buffer("short", torch.ones(WIDTH, dtype=torch.float16))
        self.plain = torch.ones(WIDTH)
        self.listed = [torch.ones(WIDTH)]
        self.norm = nn.BatchNorm1d(WIDTH)


class Whole(nn.Module):
    def __init__(self, use: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = Inner(), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.inner, x * 2)


def written(inner: Inner, x: Tensor) -> Tensor:
    inner.kept.mul_(0.9).add_(0.1 * x.mean().detach())
    return x * inner.kept


def replaced(inner: Inner, x: Tensor) -> Tensor:
    inner.kept = inner.kept * 0.9
    return x * inner.kept


def normed(inner: Inner, x: Tensor, *, training: bool) -> Tensor:
    mean, variance = inner.norm.running_mean, inner.norm.running_var
    return functional.batch_norm(x, mean, variance, training=training)


USES: dict[str, tuple[Callable[[Inner], Tensor], Callable[[Inner, Tensor], Tensor], str]] = {
    "added": (lambda inner: inner.kept, lambda inner, x: x + inner.kept, "buffer inner.kept"),
    "not saved": (lambda inner: inner.fleeting, lambda inner, x: x * inner.fleeting, "buffer inner.fleeting"),
    "cast": (lambda inner: inner.short, lambda inner, x: x + inner.short.to(x.dtype), "buffer inner.short"),
    "a scale": (lambda inner: inner.kept, lambda inner, x: x + inner.packed.to(x.dtype) * inner.kept, "buffer inner.kept"),
    "looked up": (
        lambda inner: inner.kept,
        lambda inner, x: x * inner.kept[torch.tensor([0, 3, 0, 3])].cos(),
        "buffer inner.kept",
    ),
    "in a view": (lambda inner: inner.kept, lambda inner, x: x + inner.kept.view(2, 2)[1:].repeat(1, 2), "buffer inner.kept"),
    "expanded": (lambda inner: inner.kept, lambda inner, x: torch.where(x > 9, x, inner.kept), "buffer inner.kept"),
    "a weight without its module": (
        lambda inner: inner.linear.weight,
        lambda inner, x: functional.linear(x, inner.linear.weight),
        "weight inner.linear.weight",
    ),
    "an attribute": (lambda inner: inner.plain, lambda inner, x: x - inner.plain, "attribute inner.plain"),
    "in a list": (lambda inner: inner.listed[0], lambda inner, x: x - inner.listed[0], "a tensor that was bad already"),
    "chosen": (
        lambda inner: inner.kept,
        lambda inner, x: torch.where(x < 99, inner.kept, (-x).log()),
        "buffer inner.kept",
    ),
    "chosen where it is not": (
        lambda inner: inner.kept,
        lambda inner, x: torch.where(x > 99, (-x).log(), inner.kept * x),
        "buffer inner.kept",
    ),
    "statistics": (
        lambda inner: inner.norm.running_var,
        lambda inner, x: normed(inner, x, training=False),
        "buffer inner.norm.running_var",
    ),
    "written": (lambda inner: inner.kept, written, "buffer inner.kept"),
    "replaced": (lambda inner: inner.kept, replaced, "buffer inner.kept"),
    # what follows is bad and is no cause
    "statistics that are only written": (
        lambda inner: inner.norm.running_var,
        lambda inner, x: normed(inner, x * 1e38, training=True) / 0,
        "aten.",
    ),
    "not read": (lambda inner: inner.kept, lambda _, x: (x - x) / 0, "aten.div"),
    "not chosen": (
        lambda inner: inner.kept,
        lambda inner, x: torch.where(x > 99, inner.kept, (-x).log()),
        "aten.log",
    ),
    "read in vain": (
        lambda inner: inner.kept,
        lambda inner, x: torch.where(x < 99, x, inner.kept) / 0,
        "aten.div",
    ),
}  # fmt: skip


def report_of(model: nn.Module, *batches: Tensor, losses: tuple[float, ...] = ()) -> RankReport:
    """Calls of the model as a replay makes them, with the walk back from the first bad value."""
    seen = ReplayObservations(losses=losses)
    for number, batch in enumerate(batches):
        records: list[BatchRecord] = []
        readings = PlacedReadings(Meters())
        operations = readings.operations = Operations(readings)
        names = names_of(model, operations)
        place = Position(step=1, micro=number)
        hooks = Hooks(
            model, on_record=records.append, position=lambda at=place: at, readings=lambda _, mine=readings: mine
        )
        with operations:
            model(batch)
        hooks.detach()
        readings.settle()
        history = History(operations.done, readings.stats)
        look_at(SimpleNamespace(module=model), records[0], seen, history, readings, names, 8)
    return RankReport(
        rank=0, first_bad=seen.first_bad, origin=seen.origin, held=seen.held, replayed="forward and backward"
    )


def test_what_the_model_kept_is_named_and_nothing_else_is() -> None:
    wrong = []
    for name, (kept, use, said) in USES.items():
        for bad in (NAN, INF) if name != "statistics" else (NAN,):  # divided by the root of inf it is zero
            torch.manual_seed(0)
            model = Whole(use).eval()
            with torch.no_grad():
                kept(model.inner).fill_(bad)
            report = report_of(model, torch.rand(3, WIDTH) + 0.5)
            found = judge([report])
            text = " ".join((found[0].title, *found[0].evidence)) if found else ""
            is_kept = not said.startswith("aten")
            if (
                said not in text
                or (report.held is not None) is not is_kept
                or (is_kept and "test_held.py:" not in text)
            ):
                wrong.append(f"{name}, {bad}: {text or 'nothing'}")

    assert wrong == []


def test_finite_buffers_are_named_nowhere() -> None:
    wrong = []
    for name, (_, use, _) in USES.items():
        report = report_of(Whole(lambda inner, x, use=use: use(inner, x) / 0).eval(), torch.rand(3, WIDTH) + 0.5)
        if report.held is not None or report.origin is None:
            wrong.append(f"{name}: {report.origin} {report.held}")

    assert wrong == []


def test_a_buffer_that_the_batch_writes_is_told_with_its_line() -> None:
    model = Whole(written)
    model.inner.kept.fill_(NAN)
    (found,) = judge([report_of(model, torch.ones(1, WIDTH))])

    assert any("inner.kept.mul_(0.9)" in line for line in found.evidence if line.startswith("written in this batch by"))
    assert found.fix is not None
    assert found.fix.text.startswith("keep nan and inf out of it")


def test_an_average_that_a_later_batch_made_bad_is_that_batch_and_not_the_average() -> None:
    def averaged(inner: Inner, x: Tensor) -> Tensor:
        mean = x.mean() / (x.abs().max() - 2.0)
        inner.kept.mul_(0.9).add_(mean)
        return x * inner.kept

    # live, the second batch has left its inf there, and the first is replayed with it
    for kept in (INF, 1.0):
        model = Whole(averaged)
        model.inner.kept.fill_(kept)
        report = report_of(model, torch.full((1, WIDTH), 3.0), torch.ones(1, WIDTH))

        assert report.origin is not None
        assert report.origin.line.endswith("mean = x.mean() / (x.abs().max() - 2.0)")


def test_a_later_batch_that_holds_nan_itself_is_told_and_not_the_average_it_left_it_in() -> None:
    model = Whole(written)
    model.inner.kept.fill_(NAN)
    (found,) = judge([report_of(model, torch.ones(1, WIDTH), torch.full((1, WIDTH), NAN))])

    assert found.rule == "nan-in-the-batch"
    assert "micro-batch 1" in " ".join((found.title, *found.evidence, found.fix.text if found.fix else ""))


def test_what_became_bad_between_two_batches_is_told_of_the_one_whose_live_loss_says_so() -> None:
    wrong = []
    for losses, micro in (((1.0, NAN, NAN), 1), ((1.0, 1.0, INF), 2), ((NAN, NAN, NAN), 0), ((), 0)):
        model = Whole(lambda inner, x: x * inner.kept)
        model.inner.kept[1] = NAN
        report = report_of(model, *(torch.ones(1, WIDTH),) * 3, losses=losses)
        if report.held is None or report.first_bad is None or report.first_bad.frame.micro != micro:
            wrong.append(f"{losses}: {report.first_bad}")

    assert wrong == []


def test_a_row_that_a_buffer_masks_entirely_is_the_softmax_and_the_buffer_beside_it() -> None:
    model = Whole(lambda inner, x: (x + inner.kept).softmax(-1))
    model.inner.kept = torch.zeros(2, WIDTH)
    model.inner.kept[0] = -INF
    (found,) = judge([report_of(model, torch.ones(2, WIDTH))])

    assert found.rule == "overflow-in-module"
    assert "from the buffer inner.kept, which holds -inf" in found.title
    assert any("softmax" in line for line in found.evidence)


def test_without_a_replay_a_bad_buffer_is_told_beside_the_module_and_a_finite_one_is_not() -> None:
    class Scaled(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((WIDTH,), value))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * INF

    for value, said in (
        (NAN, "in output, and its buffer scale holds 4 nan of 4"),
        (1.0, "in output from finite inputs"),
    ):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(value))
        with DebugUnderflowOverflow(model), pytest.raises(ValueError, match=said):
            model(torch.rand(3, WIDTH))


def test_what_a_model_holds_that_is_bad_is_found_and_its_masks_are_not() -> None:
    inner = Inner()
    assert bad_tensors(inner) == ()

    inner.kept[:2] = -INF
    inner.plain[1] = NAN
    inner.linear.weight.data[0, 0] = INF
    assert [(each.name, each.nan, each.posinf) for each in bad_tensors(inner)] == [
        ("weight linear.weight", 0, 1),
        ("attribute plain", 1, 0),
    ]


def test_weights_that_share_a_memory_as_deepspeed_lays_them_are_told_apart() -> None:
    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = functional.linear(x, layer.weight, layer.bias)
            return x

    def laid_together(model: nn.Module) -> None:
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        start = 0
        for parameter in model.parameters():
            parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    class OneOfThem(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.layers[used].weight.t())

    for used in range(3):
        model: Linears = OneOfThem()
        laid_together(model)
        for layer in model.layers:
            layer.weight.data[0, 0] = NAN
        model.layers[used].weight.data[1, 1:3] = INF
        (found,) = judge([report_of(model, torch.ones(1, WIDTH))])

        assert found.title.startswith(f"the weight layers.{used}.weight holds ")

    for bad in range(3):
        model = Linears()
        laid_together(model)
        model.layers[bad].weight.data[1, 1] = NAN
        (found,) = judge([report_of(model, torch.ones(1, WIDTH))])

        assert found.title == f"the weight layers.{bad}.weight holds 1 nan of {WIDTH * WIDTH}"
        assert found.affects == (f"layers.{bad}",)
