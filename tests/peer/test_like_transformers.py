"""The guide's class beside ours on the same model and seed: where theirs is right, the lines are the same."""

import contextlib
import difflib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsdoctor import DebugUnderflowOverflow

pytestmark = pytest.mark.peer
transformers = pytest.importorskip("transformers")


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def theirs() -> Any:
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs

    return Theirs


def printed(make: Callable[[], nn.Module], debug: Any, plant: str = "", batches: int = 1, **options: Any) -> list[str]:
    """What a class prints during some batches, as lines."""
    torch.manual_seed(0)
    model = make().train()
    ids = torch.arange(10).view(2, 5)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(ValueError):
        debug(model, **options)
        for batch in range(batches):
            if plant and batch == batches - 1:
                model.get_submodule(plant).weight.data.mul_(3e38)
            torch.manual_seed(batch)
            model(input_ids=ids, labels=ids)
    return out.getvalue().splitlines()


MORE = re.compile(r" input\[[a-z_]+\]$| (?:output|input\[\d+\])(?:\.[a-z_]+)+$")
"""What ours sees and theirs does not: keyword inputs and what is inside mappings."""


def common(lines: list[str]) -> list[str]:
    """Ours without what theirs cannot see."""
    return [line for line in lines if not MORE.search(line)]


def without_words(lines: list[str]) -> list[str]:
    """Theirs without what it says of a mapping: that it is no tensor."""
    return [line for line in lines if line != f"{'not a tensor':>17} output"]


@pytest.mark.parametrize("make", [t5, gpt2])
def test_a_traced_batch_is_the_same_line_for_line(make: Callable[[], nn.Module]) -> None:
    options = {"trace_batch_nums": [0, 2]}
    their, our = (printed(make, debug, batches=3, **options) for debug in (theirs(), DebugUnderflowOverflow))

    assert "\n".join(difflib.unified_diff(without_words(their), without_words(common(our)), lineterm="")) == ""
    assert len(without_words(their)) > 100
    assert len(our) > len(their)


@pytest.mark.parametrize(
    ("make", "plant"), [(t5, "encoder.block.1.layer.1.DenseReluDense.wo"), (gpt2, "transformer.h.1.mlp.c_proj")]
)
def test_the_report_of_an_overflow_is_the_same_line_for_line(make: Callable[[], nn.Module], plant: str) -> None:
    their, our = (printed(make, debug, plant, 2) for debug in (theirs(), DebugUnderflowOverflow))
    frames = next(index for index, line in enumerate(their) if line.startswith("Last "))

    assert their[frames].startswith("Last 21 forward frames")
    assert without_words(their) == without_words(common(our))
    assert any(re.match(r".* (inf|nan) (output|weight|input\[0\])$", line) for line in our)


def test_where_theirs_crashes_or_is_blind_ours_sees() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": x.sum() * float("nan")}

    theirs()(model := Loss())
    model(torch.ones(2))
    with pytest.raises(
        ValueError, match=r"the loss is not finite, 1 nan of 1 in output\.loss, and every module's output is finite"
    ):
        DebugUnderflowOverflow(model := Loss())
        model(torch.ones(2))
    with pytest.raises(RuntimeError):
        theirs()(model := nn.Identity())
        model(torch.ones(0))
    with DebugUnderflowOverflow(model := nn.Identity()) as watching:
        model(torch.ones(0))

    assert watching.batch_number == 1
