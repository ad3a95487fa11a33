"""A rank that fails because another one has ended says what that one raised."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.ranks.failure import read_failure
from dsdoctor.run.script import failure_line, follows

SCRIPT = """
import os, socket, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def load(step):
    if str(dist.get_rank()) == sys.argv[1] and step == 1:
        raise ValueError("sample 17 has no label")
    if sys.argv[1] == "0" and step == 1:
        ended = False
        while not ended:
            try:
                socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
                time.sleep(0.1)
            except OSError:
                ended = True
        raise KeyError("weights")
for step in range(3):
    load(step)
    dist.all_reduce(torch.ones(3))
"""

WORKER = """
import json, os, signal, sys, threading
from datetime import timedelta
import torch.distributed as dist
from dsdoctor.ranks.failure import read_failure
from dsdoctor.run.script import other_failure
rank = int(os.environ["RANK"])
host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
def caught(act):
    try:
        act()
    except Exception as error:
        return error
def waits_in_vain():
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(milliseconds=1))
def wraps():
    try:
        waits_in_vain()
    except Exception as error:
        raise RuntimeError("training failed, see above") from error
def treats():
    try:
        raise RuntimeError("Rank 1 failed to pass monitoredBarrier in 2000 ms")
    except RuntimeError:
        raise KeyError("run") from None
def has_the_client_waiting():
    store = dist.distributed_c10d._get_default_store()
    threading.Thread(target=store.wait, args=(["never"], timedelta(hours=1)), daemon=True).start()
    while not threading.active_count() > 1:
        pass
    raise KeyError("label")
def reads():
    compile("x = = 1", "/work/model.py", "exec")
def has_a_host_that_stands():
    os.kill(pid, signal.SIGSTOP)
    raise KeyError("label")
if rank == 0:
    host.set("pid", str(os.getpid()))
pid = int(host.get("pid"))
said = {}
for act in (waits_in_vain, wraps, treats, reads, has_a_host_that_stands, has_the_client_waiting):
    dist.init_process_group("gloo", store=dist.PrefixStore(act.__name__, host), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        said[act.__name__] = other_failure(read_failure(caught(act)))
        if act is has_a_host_that_stands:
            os.kill(pid, signal.SIGCONT)
    dist.barrier()
    if rank == 0:
        said[act.__name__] = other_failure(read_failure(ValueError("a first one")))
    dist.barrier()
    if act is not has_the_client_waiting:
        dist.destroy_process_group()
print(json.dumps(said), flush=True)
os._exit(0)
"""


def started(folder: Path, *command: str) -> "list[subprocess.Popen[str]]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.launch
def test_a_rank_that_fails_says_what_another_one_raised_and_nothing_where_the_store_is_gone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    both = [started(tmp_path, "-m", "dsdoctor.run", "--hang", "off", "train.py", bad) for bad in ("0", "1")]
    (first, alone), (told, second) = ([rank.communicate(timeout=120)[1] for rank in ranks] for ranks in both)

    assert "dsdoctor [rank 0]: rank 1 raised ValueError: sample 17 has no label at train.py:8\n" in told
    assert "1 raised" not in second
    assert "1 raised" not in first
    # the store ended with rank 0: nobody is asked, and torch prints no page about that
    assert "KeyError: 'weights'" in alone
    assert "0 raised" not in alone
    assert "[c10d]" not in alone


@pytest.mark.launch
def test_what_only_follows_is_left_nowhere_and_no_lock_and_no_standing_host_keeps_a_process(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    left, mine = (
        json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in started(tmp_path, "worker.py")
    )

    assert set(mine.values()) == {""}
    assert {left[name] for name in ("waits_in_vain", "wraps", "treats")} == {""}
    assert left["reads"] == "rank 1 raised SyntaxError: invalid syntax (model.py, line 1) at worker.py:33"
    assert left["has_the_client_waiting"].startswith("rank 1 raised KeyError: 'label' at worker.py:")


def test_a_failure_in_a_line_is_placed_in_the_users_own_code() -> None:
    def load() -> None:
        Path(os.devnull, "nothing").read_text()

    with pytest.raises(OSError, match="nothing") as caught:
        load()

    assert failure_line(read_failure(caught.value)).startswith("NotADirectoryError: ")
    assert failure_line(read_failure(caught.value)).endswith("at test_other_ranks.py:143")


def test_causes_that_form_a_circle_are_each_asked_once() -> None:
    first, second = ValueError("a bad label"), RuntimeError("a bad batch")
    first.__cause__, second.__cause__ = second, first
    # as Python 3.11's ExceptionGroup has them
    group = Exception("both")
    vars(group)["exceptions"] = (first, second)
    second.__context__ = group
    assert [follows(read_failure(each)) for each in (first, second, group)] == [False] * 3

    second.args = ("Connection closed by peer",)
    assert [follows(read_failure(each)) for each in (first, second, group)] == [True] * 3
