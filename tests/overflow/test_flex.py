"""A padded batch under flex attention: the fault is told with its own line, not the mask's.

torch gives flex attention no backward on a CPU, so the layers are frozen here and the head alone is trained;
``launch/test_gpu.py`` has training ones.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dsdoctor.overflow.frames.first_bad import BadKind, RankReport
from dsdoctor.overflow.replay.investigate import replayed
from dsdoctor.overflow.replay.replay import BatchRecorder
from tests.overflow.engine import Engine

pytestmark = pytest.mark.slow
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 8, 32


class Attention(nn.Module):
    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        parts = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(lambda b, _h, _q, k: padding[b, k], BATCH, HEADS, LENGTH, LENGTH, device="cpu")
        attended = flex_attention(*parts, block_mask=mask)
        if self.bad == "before":
            attended = attended * 3e38 * 1e9  # planted
        made = self.o_proj(attended.transpose(1, 2).reshape(x.shape))
        if self.bad == "behind":
            made = made / (made - made)  # planted
        return x + made


class Net(nn.Module):
    def __init__(self, bad: str) -> None:
        super().__init__()
        self.attention, self.head = Attention(bad).requires_grad_(requires_grad=False), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.attention(x, padding)).mean()


@pytest.mark.parametrize(
    ("bad", "kind", "module"),
    [("behind", BadKind.MODULE, "attention"), ("before", BadKind.BETWEEN, "attention.o_proj")],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_line_is_the_faults_and_not_the_masks(bad: str, kind: BadKind, module: str, side: str) -> None:
    torch.manual_seed(0)
    engine = Engine(Net(bad))
    recorder = BatchRecorder(engine)
    padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padding[1, :3] = False
    padding = padding if side == "left" else padding.flip(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that flex attention is not compiled, which costs what it costs
        engine(torch.randn(BATCH, LENGTH, WIDTH), padding).backward()
        (report,) = replayed(engine, recorder, RankReport(rank=0, dtype="float32"), batch=0, most_frames=5)

    assert report.first_bad is not None
    assert (report.first_bad.kind, report.first_bad.frame.module) == (kind, module)
    assert report.origin is not None
    assert report.origin.line.endswith("# planted")
