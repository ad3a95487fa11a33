"""What a failing rank wrote: its recorder is read for the verdict, and its files come to rank 0's folder from another machine."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.comm.collectives import checks as collective_checks
from dsdoctor.comm.collectives.checks import FailedExchange
from dsdoctor.comm.control.member import put_evidence, take_evidence
from dsdoctor.comm.launch.on_host import files_of
from dsdoctor.comm.launch.start import MAX_FILE_BYTES, MAX_FILES, write_files
from dsdoctor.comm.rendezvous.store import MessageBoard
from dsdoctor.comm.results import Stuck
from dsdoctor.ranks.flight_recorder import flight_file, read_recorded
from tests.comm.fault_table import played
from tests.comm.generated_faults import MISDEEDS, generated
from tests.comm.made_claims import claims
from tests.comm.rig import missing
from tests.comm.test_board import Memory

INSIDE = ('File "/site/torch/distributed/distributed_c10d.py", line 3 in all_reduce',)


def entry(number: int, name: str = "all_reduce", state: str = "scheduled", **more: object) -> dict[str, object]:
    return {"collective_seq_id": number, "profiling_name": f"gloo:{name}", "input_sizes": [[4]], "state": state, **more}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"entries": [entry(3, state="completed"), entry(4)]}), (4, "all_reduce", "4")),
        (json.dumps({"entries": [entry(7), entry(9, is_p2p=True)]}), (7, "all_reduce", "4")),
        (json.dumps({"entries": [entry(9, process_group=["0"]), entry(2, process_group=["1"])]}), (2, "all_reduce", "4")),
        (json.dumps({"entries": [{"collective_seq_id": 1, "retired": True}]}), (1, "", "")),
        (json.dumps({"entries": [{"collective_seq_id": "x"}, 3]}), None),
        (json.dumps({"entries": {}}), None),
        ("[" * 100_000, None),
        ("not json", None),
    ],
)  # fmt: skip
def test_a_dump_gives_the_last_collective_or_nothing(
    text: str, said: tuple[object, ...] | None, tmp_path: Path
) -> None:
    flight_file(str(tmp_path), 7).write_text(text)

    found = read_recorded(flight_file(str(tmp_path), 7))

    assert (found and (found.sequence, found.operation, found.size)) == said


def waits(rank: int, sequence: int | None, *, stack: tuple[str, ...] = INSIDE) -> Stuck:
    return Stuck(
        rank=rank, at="all_reduce", step=5, seconds=8.0, stack=stack, sequence=sequence, operation="all_reduce of 4"
    )


def told(*ranks: Stuck) -> list[tuple[str, str]]:
    trouble = FailedExchange(what="the collectives", claims=claims(), stuck=ranks, silent={})
    return [(finding.rule, finding.title) for check in collective_checks.STUCK_CHECKS for finding in check(trouble)]


@pytest.mark.parametrize("late", range(4))
def test_a_rank_whose_stack_is_unseen_is_behind_by_what_it_began(late: int) -> None:
    ranks = [waits(rank, 12) for rank in range(4)]
    unseen = [waits(rank, 11, stack=()) if rank == late else one for rank, one in enumerate(ranks)]
    ((rule, title),) = told(*unseen)

    assert (rule, title.split(" (")[0]) == ("rank-behind", f"rank {late}")
    assert "started 11 collectives (alive)" in title
    # inside of the library it may wait for the others in an earlier one, and unread recorders decide nothing
    assert [rule for rule, _ in told(*(replace(one, stack=INSIDE) for one in unseen))] == ["exchange-hangs"]
    assert [rule for rule, _ in told(*(replace(one, sequence=None) for one in unseen))] == ["exchange-hangs"]


@pytest.mark.parametrize(("world", "size"), list(itertools.product((2, 1000), (0, 100, 200_000))))
def test_the_ends_of_the_files_come_over_the_board(world: int, size: int, tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    (theirs / "rank-00001.log").write_text("".join(f"line {number:06d}\n" for number in range(size // 12)))
    (theirs / "stack-77.txt").write_text("a stack")
    board = MessageBoard(Memory(), "p")

    put_evidence(board, 1, world, "nodeb", str(theirs), 77)
    board.store.set("p/evidence/2", b'{"host": 3}')
    paths = take_evidence(board, (1, 2, 3), str(mine), "nodea")

    names = ["rank-00001.log", "rank-00001.stack.txt"] if size else ["rank-00001.stack.txt"]
    assert [Path(path).name for path in paths] == names
    if size:
        carried = Path(paths[0]).read_text()
        assert (theirs / "rank-00001.log").read_text().endswith(carried)
        assert carried.startswith("line ")
        assert len(carried) <= min(MAX_FILE_BYTES, (1 << 24) // world)
    assert (mine / "evidence").stat().st_mode & 0o077 == 0
    # a rank of this host that writes into this folder has its files there already
    (mine / "rank-00001.log").touch()
    assert take_evidence(board, (1,), str(mine), "nodeb") == ()


def test_a_host_sends_what_its_rank_0_kept_of_a_failed_test(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("a\n" * MAX_FILE_BYTES)
    (tmp_path / "rank-00001.log").write_text("not evidence")
    write_files(tmp_path, {"rank-00003.stack.txt": "a stack"})

    sent = {told.name: told.text for told in files_of(json.dumps({"report": {"out": str(tmp_path)}}))}

    assert {name: len(text) for name, text in sent.items()} == {
        "rank-00000.log": MAX_FILE_BYTES,
        "rank-00003.stack.txt": 7,
    }
    assert [*files_of(json.dumps({"report": {"out": None}})), *files_of("no document"), *files_of("")] == []


def test_of_the_files_of_another_host_only_ours_are_let_in(tmp_path: Path) -> None:
    hostile = {
        "../out.log": "x",
        "rank-00001.sh": "x",
        "rank-00001.log": "y" * (MAX_FILE_BYTES + 5),
        "rank-00002.log": "",
    }
    hostile |= {f"rank-{number:05d}.stack.txt": "z" for number in range(200)}

    paths = write_files(tmp_path, hostile)

    assert len(paths) == MAX_FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence"]
    assert (tmp_path / "evidence/rank-00001.log").stat().st_size == MAX_FILE_BYTES


WANTED = {"raises": ("log", "flight.json"), "sleeps in Python": ("stack.txt", "flight.json")}


@pytest.mark.launch
@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.parametrize("name", WANTED)
def test_the_files_of_a_rank_on_another_machine_are_carried_to_rank_0(name: str, tmp_path: Path) -> None:
    misdeed = next(misdeed for misdeed in MISDEEDS if misdeed.name == name)
    folders = [tmp_path / "of-rank-0", tmp_path / "of-rank-1"]
    for folder in folders:
        folder.mkdir()
    own = {rank: {"TMPDIR": str(folder)} for rank, folder in enumerate(folders)}
    fault = replace(generated((misdeed,), (1,), (9,), ("--quick",))[0], world=2, nodes=2, own=own)
    argv = ["-m", "dsdoctor.comm", "--quick", "--backend", "gloo", "--deadline", "25", "--json"]

    with played(fault, tmp_path, argv, "dsdoctor.comm", hold_at=0) as running:
        assert running.wait(40), running.told()
        whole = json.loads(running.out("0"))
    carried = Path(whole["report"]["out"]) / "evidence"

    assert "rank 1 (nodeb" in whole["findings"][0]["title"]
    assert carried.is_relative_to(folders[0])
    assert [ending for ending in WANTED[name] if not (carried / f"rank-00001.{ending}").exists()] == []
    if name == "raises":
        assert "ValueError: batch 7 is empty" in (carried / "rank-00001.log").read_text()
    assert json.loads((carried / "rank-00001.flight.json").read_text())["entries"]
    stuck = {one["rank"]: one for one in whole["report"]["stuck"]}
    assert stuck[1]["sequence"] is not None
