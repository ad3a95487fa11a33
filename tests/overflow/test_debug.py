"""The guide's class and function on a plain module."""

import pytest
import torch
from torch import Tensor, nn

from dsdoctor import DebugUnderflowOverflow, OverflowDetected, detect_overflow
from dsdoctor.core.errors import UsageError


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_the_report_is_the_guides(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Times(2), Times(1e30), Times(1e30))
    DebugUnderflowOverflow(model, max_frames_to_save=2)
    with pytest.raises(OverflowDetected, match=r"inf/nan detected during batch_number=0: 2 \(Times\) made 2 inf of 2"):
        model(torch.tensor([1.0, 3.0]))

    assert capsys.readouterr().out == (
        "output has infs\n"
        "\n"
        "Detected inf/nan during batch_number=0\n"
        "Last 2 forward frames:\n"
        "abs min  abs max  metadata\n"
        "                  1 Times\n"
        "2.00e+00 6.00e+00 input[0]\n"
        "2.00e+30 6.00e+30 output\n"
        "                  2 Times\n"
        "2.00e+30 6.00e+30 input[0]\n"
        "     inf      inf output\n"
        "\n\n\n"
    )


def test_the_exception_is_a_value_error_as_in_the_guide() -> None:
    model = Times(float("inf"))
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="batch_number=1"):
        for x in (torch.zeros(0), torch.ones(1)):
            model(x)


def test_frames_of_the_batch_before_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    model = Times(1e38)
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="batch_number=1"):
        for x in (torch.ones(1), torch.ones(1) * 10):
            model(x)

    printed = capsys.readouterr().out
    assert "*** Starting batch number=0 ***" in printed
    assert "*** Starting batch number=1 ***" in printed


def test_a_traced_batch_is_printed_whole_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Times(float("inf")))
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(torch.ones(1))

    assert capsys.readouterr().out == (
        "\n\n"
        "                  *** Starting batch number=0 ***\n"
        "abs min  abs max  metadata\n"
        "                  0 Times\n"
        "1.00e+00 1.00e+00 input[0]\n"
        "     inf      inf output\n"
        "                   Sequential\n"
        "1.00e+00 1.00e+00 input[0]\n"
        "     inf      inf output\n"
    )


def test_a_clean_batch_after_a_traced_one_with_an_inf_goes_on() -> None:
    model = Times(1e38)
    watching = DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(torch.ones(1) * 10)
    model(torch.ones(1))

    assert watching.batch_number == 2


def test_it_stops_after_the_batch_that_was_named() -> None:
    model = Times(1.0)
    DebugUnderflowOverflow(model, abort_after_batch_num=1)
    model(torch.ones(1))
    with pytest.raises(ValueError, match="stopped after batch 1"):
        model(torch.ones(1))


def test_a_mask_lets_a_training_go_on() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    DebugUnderflowOverflow(layer)

    layer(torch.randn(2, 5, 8), src_mask=nn.Transformer.generate_square_subsequent_mask(5))


def test_words_for_numbers_and_twice_are_refused() -> None:
    model = Times(1.0)
    with pytest.raises(UsageError, match="trace_batch_nums holds -1"):
        DebugUnderflowOverflow(model, trace_batch_nums=[-1])
    with pytest.raises(UsageError, match="max_frames_to_save holds 0"):
        DebugUnderflowOverflow(model, max_frames_to_save=0)
    with pytest.raises(UsageError, match="batch 5 would be traced after it"):
        DebugUnderflowOverflow(model, trace_batch_nums=[5], abort_after_batch_num=3)
    with DebugUnderflowOverflow(model), pytest.raises(UsageError, match="watched already"):
        DebugUnderflowOverflow(model)


def test_a_compiled_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = Times(1.0)
    model._compiled_call_impl = model._call_impl  # what compile() leaves there
    DebugUnderflowOverflow(model).detach()

    assert "the model is compiled" in capsys.readouterr().err


def test_a_watch_that_ended_can_be_followed_by_another() -> None:
    model = Times(1.0)
    with DebugUnderflowOverflow(model):
        pass

    assert DebugUnderflowOverflow(model).batch_number == 0


def test_detect_overflow_says_what_the_guide_says_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect_overflow(torch.tensor([[float("nan"), float("-inf"), 2.0]], dtype=torch.float16), "after b")
    assert capsys.readouterr().out == (
        "after b has nans\nafter b has infs\n  1 nan, 0 inf, 1 -inf of 3; finite up to 2.00e+00; float16 1x3\n"
    )


def test_detect_overflow_bears_whatever_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = (torch.ones(2), torch.ones(0), torch.ones(2, dtype=torch.bool), None, torch.ones(1, device="meta"))

    assert not any(detect_overflow(value, "x") for value in given)
    assert capsys.readouterr().out == ""


class Root(nn.Module):
    """A part that may overflow in its forward, or whose gradient may."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), Times(factor))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).sqrt()).sum()


def test_the_attributes_of_transformers_class_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    model = Root()
    watching = DebugUnderflowOverflow(model, max_frames_to_save=3)
    model.head(model.encoder(torch.ones(1, 2)))

    assert watching.total_calls == 4
    assert [text.split(" metadata\n")[-1].split("\n")[0].split() for text in watching.frames] == [
        ["encoder.1", "Times"],
        ["encoder", "Sequential"],
        ["head", "Linear"],
    ]
    assert (watching.detected_overflow, watching.frame) == (False, [])
    assert watching.module_names[model.encoder[1]] == "encoder.1"
    watching.dump_saved_frames()
    assert "Last 3 forward frames:" in capsys.readouterr().out
    assert not watching.frames
    watching.detach()


def test_a_part_that_is_called_by_itself_is_a_batch_and_its_overflow_is_seen() -> None:
    model = Root(float("inf"))
    watching = DebugUnderflowOverflow(model)
    model.head(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"batch_number=1: encoder\.1 \(Times\) made"):
        model.encoder(torch.ones(1, 2))

    assert watching.batch_number == 2
    assert watching.detected_overflow


def test_a_bad_gradient_ends_the_training_where_gradients_are_asked_for() -> None:
    for asked in (False, True):
        model = Root(0.0)
        watching = DebugUnderflowOverflow(model, gradients=asked)
        loss = model(torch.ones(1, 2))
        if asked:
            with pytest.raises(OverflowDetected, match="in the gradient of encoder"):
                loss.backward()
        else:
            loss.backward()
        assert watching.detected_overflow is asked


def test_a_gradient_that_a_loss_scale_may_have_made_too_large_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 1)).half()
    DebugUnderflowOverflow(model, gradients=True)
    (model(torch.ones(1, 2).half()) * 6e4 * 100).sum().backward()

    said = capsys.readouterr().out
    assert "its loss is computed outside of the model, so that a loss scale may be the cause" in said
    assert "batch_number=0" in said
