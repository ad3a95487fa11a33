"""Modules in a compiled graph: all outputs are measured, with one graph break at the root and none per module."""

import pytest
import torch
from torch import nn

from dsdoctor.overflow.hooks.module_hooks import Hooks

pytestmark = pytest.mark.launch  # launches nothing, but the compiler takes seconds to import


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), nn.Linear(3, 1))


@pytest.mark.filterwarnings("ignore")
def test_what_a_compiled_model_gives_is_seen_and_the_same_is_computed() -> None:
    x = torch.tensor([[1.0, 2.0]])
    model = net()
    hooks = Hooks(model, on_record=lambda record: None, compiled_on=torch.device("cpu"))
    model.compile(backend="eager")
    output = model(x)
    output.sum().backward()
    frames = hooks.compiled_frames()
    again = hooks.compiled_frames()
    hooks.detach()

    plain = net()
    assert torch.equal(output, plain(x))
    assert [frame.module for frame in frames] == ["0", "1.0", "1.1", "1", "2", ""]
    assert frames[-1].outputs[0].absmax == output.abs().item()
    assert frames[0].outputs[0].absmax == plain[0](x).abs().max().item()  # type: ignore[index]
    assert again == []


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_the_script_exports_holds_nothing_of_ours() -> None:
    x = torch.tensor([[1.0, 2.0]])
    model = net()
    plain = [node.name for node in torch.export.export(model, (x,)).graph.nodes]
    hooks = Hooks(model, on_record=lambda record: None, compiled_on=torch.device("cpu"))
    watched = [node.name for node in torch.export.export(model[1], (torch.ones(1, 3),)).graph.nodes]
    unwatched = [node.name for node in torch.export.export(net()[1], (torch.ones(1, 3),)).graph.nodes]
    hooks.detach()

    assert watched == unwatched
    assert len(plain) > len(watched)


@pytest.mark.filterwarnings("ignore")
def test_the_graph_breaks_once() -> None:
    model = net()
    hooks = Hooks(model, on_record=lambda record: None, compiled_on=torch.device("cpu"))
    explained = torch._dynamo.explain(model._call_impl)(torch.ones(1, 2))
    hooks.detach()

    assert explained.graph_break_count <= 1
