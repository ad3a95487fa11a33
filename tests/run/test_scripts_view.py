"""What a script sees of itself under `dsdoctor.run` is what it sees without: threads, functions, files that are opened."""

import sys
from pathlib import Path

import pytest

from tests.run.test_run import ended, folder, started, watched

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
def test_the_watching_thread_is_in_no_list_of_threads_and_has_no_hooks_of_the_script() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    watching = watched(THREADS, **rank, THREADS="2")

    assert watching[:2] == (0, "['MainThread'] 1\n[]\n"), watching
    assert watching[:2] == ended(started([sys.executable, "train.py"], THREADS="1"))[:2]
