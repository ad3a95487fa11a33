"""Models with adapters and frozen parts are followed: what converts its parameters while it is made, as peft does, too."""

import json
import sys
from pathlib import Path

import pytest

from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import LocalHost
from dsdoctor.memory.models import ModelShape, parse_model

pytestmark = pytest.mark.slow
pytest.importorskip("torch")
SOURCE = """
import torch

WIDTH, RANK = 64, 4

class Adapted(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        self.down["default"] = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.up["default"] = torch.nn.Linear(RANK, WIDTH, bias=False)
        for part in (self.down, self.up):
            part["default"] = part["default"].to(base.weight.device, dtype=DTYPE)

    def forward(self, x):
        return self.base(x) + self.up["default"](self.down["default"](x.to(self.down["default"].weight.dtype))).to(x.dtype)

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(Adapted(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("base" not in name)

    def forward(self, x):
        return {"loss": self.layers(x).float().pow(2).mean()}

def make():
    return Chain(), lambda batch, sequence: {"x": torch.zeros(batch, sequence, WIDTH, dtype=torch.bfloat16)}
"""


def shape_of(folder: Path, dtype: str) -> ModelShape:
    file = folder / "adapted.py"
    file.write_text(SOURCE.replace("DTYPE", f"torch.{dtype}"))
    wish = json.dumps({"model": f"{file}:make", "dtype": "bfloat16", "runs": [[2, 8, False]]})
    host = LocalHost()
    return parse_model(parse_answer(host.ask(sys.executable, "ask_model.py", wish, timeout=120), dict, "the model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adapters_that_are_converted_while_they_are_made_are_followed(dtype: str, tmp_path: Path) -> None:
    shape = shape_of(tmp_path, dtype)

    assert shape.runs[0].error == ""
    assert shape.runs[0].events
    assert shape.elements == 3 * (64 * 64 + 64 + 2 * 4 * 64)
    assert sum(shape.parameters[number][1] for number in shape.trained) == 3 * 2 * 4 * 64
