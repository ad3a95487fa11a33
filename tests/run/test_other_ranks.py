"""A rank that fails because another one has ended says what that one raised."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.run.other_ranks import line_of

SCRIPT = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def load(step):
    if str(dist.get_rank()) == sys.argv[1] and step == 1:
        raise ValueError("sample 17 has no label")
for step in range(3):
    load(step)
    dist.all_reduce(torch.ones(3))
"""


def started(folder: Path, bad: int) -> "list[subprocess.Popen[str]]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "dsdoctor.run", "--hang", "off", "train.py", str(bad)]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.launch
def test_the_rank_that_lost_the_other_says_its_exception_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    both = [started(tmp_path, bad) for bad in (0, 1)]
    (first, lost), (told, second) = ([rank.communicate(timeout=120)[1] for rank in ranks] for ranks in both)

    assert "dsdoctor [rank 0]: before this, rank 1 raised ValueError: sample 17 has no label at train.py:8" in told
    assert "before this" not in second
    assert "before this" not in first
    # the store ended with rank 0: nobody is asked, and torch prints no page about that
    assert "Connection closed by peer" in lost
    assert "[c10d]" not in lost


def test_a_failure_in_a_line_is_placed_in_the_users_own_code() -> None:
    def load() -> None:
        Path(os.devnull, "nothing").read_text()

    with pytest.raises(OSError, match="nothing") as caught:
        load()

    assert line_of(caught.value).startswith("NotADirectoryError: ")
    assert line_of(caught.value).endswith("at test_other_ranks.py:62")
