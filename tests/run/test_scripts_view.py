"""What a script sees of itself under `dsdoctor.run` is what it sees without: threads, functions, files that are opened."""

import ast
import sys
from pathlib import Path

import pytest

import dsdoctor
from tests.hang.test_launchers import free_port
from tests.run.test_run import ROOT, ended, folder, started, watched
from tests.source import nodes

__all__ = ["folder"]

C10D = """
def init_process_group(*args, **kwargs):
    pass
"""
"""As much of torch.distributed.distributed_c10d as begins the hang watch."""
THREADS = """
import os, sys, threading, time
seen = []
def note(frame, event, argument):
    seen.append((threading.current_thread().name, frame.f_code.co_filename))
threading.setprofile(note)
threading.settrace(note)
from torch.distributed import distributed_c10d
distributed_c10d.init_process_group()
while len(sys._current_frames()) < int(os.environ["THREADS"]):
    time.sleep(0.01)
time.sleep(1.5)
print([thread.name for thread in threading.enumerate()], threading.active_count())
print(sorted({(name, file) for name, file in seen if "dsdoctor" in file or "Dummy" in name}))
"""


@pytest.fixture
def c10d(folder: Path) -> None:
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    for file, text in (("../__init__.py", ""), ("__init__.py", ""), ("distributed_c10d.py", C10D)):
        (package / file).write_text(text)


@pytest.mark.usefixtures("c10d")
@pytest.mark.slow
def test_the_watching_thread_is_in_no_list_of_threads_and_has_no_hooks_of_the_script() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    watching = watched(THREADS, **rank, THREADS="2")

    assert watching[:2] == (0, "['MainThread'] 1\n[]\n"), watching
    assert watching[:2] == ended(started([sys.executable, "train.py"], THREADS="1"))[:2]


SCRIPTS_ROOMS = (
    "run",
    "hang",
    "overflow",
    "memory",
    "ranks",
    "checkpoint",
    "config",
    "rules",
    "diagnosis",
    "ui",
    "core",
)
OF_CONFIG = (
    "config_check",
    "config_engine",
    "config_facts",
    "config_fill",
    "config_keys",
    "config_optimizer",
    "config_stages",
)


def test_no_module_that_runs_in_a_scripts_process_opens_a_file_by_the_scripts_open() -> None:
    """``builtins.open`` may be a script's own: a recorder, or one of files that are not there."""
    package = Path(dsdoctor.__file__).parent
    files = [file for room in SCRIPTS_ROOMS for file in (package / room).rglob("*.py")]
    files += [file for name in OF_CONFIG if (file := package / "child_scripts" / f"{name}.py").exists()]
    found = [
        f"{file.relative_to(package)}:{node.lineno}"
        for file in files
        for node in nodes()[file]
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and getattr(node.func, "attr", "open") in {"open", "fdopen"}
        and ast.unparse(node.func) in {"open", "os.fdopen"}
    ]

    assert len(files) > 100
    assert found == []


DEEPSPEED = """
import builtins, inspect, io, os, sys
import torch, torch.utils.cpp_extension
import deepspeed
opened = []
of = builtins.open
def spy(*args, **kwargs):
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((os.path.dirname(os.__file__) + "/pathlib", "<frozen")):
        frame = frame.f_back
    opened.append((frame.f_code.co_filename, args[0]))
    return of(*args, **kwargs)
builtins.open = io.open = spy
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    engine.backward(engine(torch.ones(4, 4)).sum() * (float("inf") if step == 1 else 1.0))
    engine.step()
builtins.open = io.open = of
functions = [deepspeed.initialize, torch.distributed.init_process_group, torch.utils.cpp_extension.load]
functions += [value for value in vars(type(engine)).values() if callable(value)]
print([each for each in functions if "/dsdoctor/" in getattr(getattr(each, "__code__", None), "co_filename", "")])
print([name for name, value in vars(engine).items() if "dsdoctor" in str(getattr(value, "__code__", name))])
print([each for each in opened if "/dsdoctor/" in each[0]])
"""


@pytest.mark.launch
def test_a_script_sees_neither_our_reads_nor_our_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")  # DeepSpeed's own op takes a minute to compile
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    Path("deepspeed.py").unlink()
    Path("train.py").write_text(DEEPSPEED)
    command = [sys.executable, "-m", "dsdoctor.run", "--overflow", "frames", "train.py"]

    status, out, err = ended(started(command, **rank, DS_ACCELERATOR="cpu", PYTHONPATH=ROOT))

    assert (status, out.splitlines()[-3:]) == (0, ["[]", "['dsdoctor']", "[]"]), err


TWO_WATCHES = """
import torch, deepspeed, dsdoctor
def made(model):
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
model = torch.nn.Linear(4, 4)
engines = [made(model), made(model), made(torch.nn.Linear(4, 4))]
again = dsdoctor.watch(engines[0], level="guard")
print(again is engines[0].dsdoctor, [engine.dsdoctor.options.level for engine in engines])
for engine in engines:
    for step in range(2):
        engine.backward(engine(torch.ones(4, 4)).sum() * (float("inf") if step else 1.0))
        engine.step()
print([[finding.rule for finding in engine.dsdoctor.findings()] != [] for engine in engines])
"""


@pytest.mark.launch
def test_a_second_watch_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same engine, of another one, and of another one on the same model."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    Path("deepspeed.py").unlink()
    Path("train.py").write_text(TWO_WATCHES)
    command = [sys.executable, "-m", "dsdoctor.run", "--overflow", "frames", "train.py"]

    status, out, err = ended(started(command, **rank, DS_ACCELERATOR="cpu", PYTHONPATH=ROOT))

    assert (status, out.splitlines()[-2:]) == (
        0,
        ["True ['frames', 'guard', 'frames']", "[True, True, True]"],
    ), err
    assert err.count("this engine is watched already, and its first watch stays") == 1, err
    assert err.count("this engine is watched at level guard") == 1, err
