"""A compile that takes long is told of, by a thread that imports nothing; an op that is half built is explained."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.script import unlisted_idents
from dsdoctor.run.op_compile import CompileNotices, waits_for_another

TORCH = """
import sys, threading
def load(name, sources=(), verbose=False):
    if name == "broken":
        raise ImportError("broken.so: cannot open shared object file: No such file or directory")
    if name == "quick":
        return "quick"
    told.wait()
    return name
told = threading.Event()
"""


def module() -> object:
    """As much of torch.utils.cpp_extension as is wrapped."""
    space = type(sys)("cpp_extension")
    exec(TORCH, vars(space))
    return space


def until_written(event: threading.Event) -> None:
    """Let the load go on once the notice is written: the thread waits for its next one then."""
    while not any(map(waits, unlisted_idents())):
        pass
    event.set()


def waits(ident: int) -> bool:
    """Whether the thread has written and waits again."""
    frame = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code.co_name == "_tell":
            return frame.f_locals.get("number", 0) > 0
        frame = frame.f_back
    return False


def test_a_compile_that_takes_long_is_told_and_a_quick_one_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    torch = module()
    CompileNotices("dsdoctor [rank 0]: ", (0.0, 3600.0)).wrap(torch)  # type: ignore[arg-type]
    release = threading.Thread(target=until_written, args=(torch.told,))  # type: ignore[attr-defined]
    release.start()

    assert torch.load(name="deepspeed_shm_comm") == "deepspeed_shm_comm"  # type: ignore[attr-defined]
    release.join()
    first, last = capfd.readouterr().err.splitlines()
    assert first == "dsdoctor [rank 0]: compiling deepspeed_shm_comm (first use), 0 s"
    assert last.startswith("dsdoctor [rank 0]: deepspeed_shm_comm is there after ")

    quick = module()
    CompileNotices("dsdoctor: ", (3600.0,)).wrap(quick)  # type: ignore[arg-type]
    assert quick.load("quick") == "quick"  # type: ignore[attr-defined]
    assert capfd.readouterr().err == ""


def test_a_failed_load_raises_as_without_us(capfd: pytest.CaptureFixture[str]) -> None:
    torch = module()
    CompileNotices("dsdoctor: ", (3600.0,)).wrap(torch)  # type: ignore[arg-type]

    with pytest.raises(ImportError, match="cannot open shared object") as raised:
        torch.load("broken")  # type: ignore[attr-defined]

    # before Python 3.11 a bare raise adds the wrapper's own line
    files = [Path(entry.path).name for entry in raised.traceback]
    assert sys.version_info < (3, 11) or "op_compile.py" not in files, files
    assert capfd.readouterr().err == ""


def test_the_thread_imports_nothing() -> None:
    script = """
import sys, threading
imported = []
sys.addaudithook(lambda event, given: event == "import" and imported.append((threading.get_ident(), given[0])))
from dsdoctor.run.op_compile import CompileNotices
torch = type(sys)("cpp_extension")
def load(name):
    while not any(frame.f_code.co_name == "_tell" and frame.f_locals.get("number", 0) > 2
                  for top in sys._current_frames().values() for frame in outwards(top)):
        pass
def outwards(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
torch.load = load
CompileNotices("dsdoctor: ", (0.0, 0.0, 0.0, 3600.0)).wrap(torch)
torch.load("fused_adam")
print([name for thread, name in imported if thread != threading.main_thread().ident])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)

    assert done.stdout == "[]\n", done.stderr
    assert done.stderr.count("compiling fused_adam (first use)") == 3


def test_a_stack_that_waits_for_the_lock_of_another_is_known(tmp_path: Path) -> None:
    seen: list[bool] = []
    for folder in ("torch/utils", "mine"):
        file = tmp_path / folder / "file_baton.py"
        space: dict[str, Any] = {"look": lambda: seen.append(waits_for_another(sys._getframe(1)))}
        exec(compile("def wait():\n    look()\n", str(file), "exec"), space)
        space["wait"]()

    assert seen == [True, False]


@pytest.mark.slow
def test_an_import_error_of_a_half_built_op_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import importlib.machinery, importlib.util\n"
        "def jit_load(path):\n"
        "    loader = importlib.machinery.ExtensionFileLoader('fused_adam', path)\n"
        "    importlib.util.module_from_spec(importlib.util.spec_from_loader('fused_adam', loader))\n"
        f"jit_load('{tmp_path}/.cache/torch_extensions/py311_cpu/fused_adam/fused_adam.so')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "dsdoctor.run", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )

    assert done.returncode == 1
    assert "dsdoctor: what this failure means:" in done.stderr, done.stderr
    assert "[masked-jit-failure]" in done.stderr
