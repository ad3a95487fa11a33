"""Ranks that stand in init_process_group: the first one, and one after a group that was destroyed."""

from pathlib import Path

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.hang.models import Frame, RankView
from dsdoctor.hang.verdict import judge
from dsdoctor.run.hang_report import HANGS, WORKS, state_of
from tests.each import each
from tests.hang.made import TORCH, frame, incident, view
from tests.hang.test_launchers import free_port
from tests.hang.test_threads import said_by_ranks

START = (
    frame("/home/a/train.py", 7, "<module>", 'dist.init_process_group("gloo")'),
    frame(TORCH, 1899, "init_process_group"),
    frame(TORCH, 2169, "_new_process_group_helper"),
)


def starts(rank: int, *, world: int, stack: tuple[Frame, ...] = START, **outside: object) -> RankView:
    return view(rank, stack, 0, world=world, joined=False, state="S", **outside)


@each(("world", "activity"), [(2, ""), (5, ""), (2, "it used or waited for 80% of a processor")])
def test_a_start_to_which_all_ranks_have_come_is_told(world: int, activity: str) -> None:
    ranks = [starts(rank, world=world, activity=activity if rank == 1 else "") for rank in range(world)]
    found = judge(incident(*ranks, world=world)).findings

    assert [(each.rule, each.severity) for each in found] == [
        ("hang-not-started", Severity.WARNING if activity else Severity.ERROR)
    ]
    assert found[0].title.startswith(f"all {world} ranks ")
    assert state_of(incident(*ranks, world=world), patient=True).state == (WORKS if activity else HANGS)


STUCK = """
import datetime, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
if {first}:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
if {absent} and rank == 1:
    time.sleep(3600)
store = dist.TCPStore("127.0.0.1", {port}, is_master=rank == 0, wait_for_workers=False)
# each waits for what the other one writes elsewhere
dist.init_process_group(
    "gloo", store=dist.PrefixStore(f"of {{rank}}", store), rank=rank, world_size=2, timeout=datetime.timedelta(minutes=9)
)
"""
ALL = "all 2 ranks have called init_process_group"


@pytest.mark.launch
@each(
    ("first", "absent", "said"),
    [
        (False, False, f"{ALL}, and it does not complete; rank 0 blocked in init_process_group at train.py:"),
        (True, False, f"{ALL} again, and it does not complete; rank 0 blocked in init_process_group at train.py:"),
        (
            True,
            True,
            "has not called init_process_group again: sleeps at train.py:10 in <module>: time.sleep(3600); rank 0 waits",
        ),
    ],
)
def test_ranks_that_stand_in_a_start_are_told_in_time(first: bool, absent: bool, said: str, tmp_path: Path) -> None:
    text = said_by_ranks(tmp_path, STUCK.format(first=first, absent=absent, port=free_port()))

    assert said in text, text
    # late first, then hung: one verdict
    assert sum("✗" in line and "[hang-" in line for line in text.splitlines()) == 1, text
