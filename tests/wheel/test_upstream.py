"""What DeepSpeed changes is seen by ci/compare_deepspeed.py: a real tree against itself, and with changes planted in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel.conftest import unpack_deepspeed

pytestmark = pytest.mark.wheel
COMPARE = Path(__file__).parents[2] / "ci" / "compare_deepspeed.py"


def compared(base: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(COMPARE), str(base), str(tree), "--name", "the tree"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_deepspeed(tmp_path_factory.mktemp("deepspeed") / "base")


def test_a_tree_is_as_it_was_and_the_tables_hold_for_it(base: Path) -> None:
    done = compared(base, base)

    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("### ")]
    assert told[-1] == "### dsdoctor's tables: they hold"
    assert all(line.endswith(": as before") for line in told[:-1])


def test_planted_changes_are_named_and_end_in_an_error(base: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(base, tree, symlinks=True)
    edit(tree / "op_builder" / "fused_lamb.py", "DS_BUILD_FUSED_LAMB", "DS_BUILD_LAMB")
    edit(tree / "op_builder" / "fused_lamb.py", "'csrc/lamb/fused_lamb_cuda.cpp'", "'csrc/lamb/lamb.cpp'")
    edit(tree / "deepspeed" / "runtime" / "config.py", "LION_OPTIMIZER = 'lion'", "LION_OPTIMIZER = 'tiger'")
    edit(tree / "deepspeed" / "io" / "fast_file_writer.py", "UtilsBuilder().load()", "AsyncIOBuilder().load()")

    done = compared(base, tree)

    assert done.returncode == 1, done.stdout + done.stderr
    for said in (
        "- fused_lamb, variable: `DS_BUILD_FUSED_LAMB` -> `DS_BUILD_LAMB`",
        "- fused_lamb, sources: new: `csrc/lamb/lamb.cpp`; gone: `csrc/lamb/fused_lamb_cuda.cpp`",
        "- new: `DS_BUILD_LAMB`",
        "- new: `async_io: io/fast_file_writer.py, FastFileWriter.__init__`",
        "- new: `tiger`",
        "- op_loads.py has no record of async_io: io/fast_file_writer.py, FastFileWriter.__init__",
        "- op_loads.py: utils: io/fast_file_writer.py, FastFileWriter.__init__ is not there",
        "- rules/forms/facts.toml does not know that DS_BUILD_LAMB builds fused_lamb",
        "- training_config.py does not know the optimizer tiger",
    ):
        assert said in done.stdout
