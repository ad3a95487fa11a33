"""The stand-in for torch that op_builder meets in a quick check: it leads to the very facts that the real torch leads to."""

import importlib.util
import sys
from pathlib import Path

import pytest

from dsdoctor.builder.source.fetch import lay_out
from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder

pytestmark = pytest.mark.wheel


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_op_builder_tells_the_same_of_its_ops(accelerator: str, tmp_path: Path) -> None:
    host = LocalHost()
    tree = lay_out(
        host, "newest", tmp_path / "source", cache=cache_folder(host), python=sys.executable, offline=False
    ).folder
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    asking = LocalHost(env={**host.environment(), "DS_ACCELERATOR": accelerator, "CUDA_HOME": "/only-for-flags"})

    def ask(torch: str) -> object:
        answer = asking.ask(sys.executable, "ask_ops.py", "source", str(tree), torch, "7.5", "9.0", timeout=120)
        return parse_answer(answer, dict, "ops")

    told = ask(str(Path(spec.origin).parent))
    assert isinstance(told, dict)
    assert len(told["ops"]) > 5
    assert told == ask("import")
