"""A script is the same with and without dsdoctor.run: six of those of `benchmarks/paired`; all of them by hand."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paired_cases import CASES
from benchmarks.paired_runs import WATCHES, Outcome, difference, normal, pairs

NAMED = {case.name: case for case in CASES}


def test_what_differs_is_seen() -> None:
    one = Outcome(status=0, stdout=["0x1.8p+0"], stderr=[], said=[], files={"a": "1", "b": "2"}, left=[], seconds=1)
    files = {"a": "3", "c": "4"}
    other = replace(
        one, status=-11, stdout=["0x1.9p+0"], stderr=["new"], files=files, left=["sleep 9"], said=["mine"], seconds=2
    )

    assert difference(one, one) == []
    assert difference(one, other) == [
        "status 0 -> -11",
        "stdout - 0x1.8p+0",
        "stdout + 0x1.9p+0",
        "stderr + new",
        "file other content: a",
        "file - b",
        "file + c",
        "process left sleep 9",
    ]


def test_a_loss_is_not_taken_for_a_time() -> None:
    assert normal("0 3 0x1.8a3d70a3d70a4p+0 12") == "0 3 0x1.8a3d70a3d70a4p+0 12"
    assert normal("at 2026-11-23 10:00:01,5 pid=7") == normal("at 2027-01-02 11:30:00,7 pid=81")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "watch"),
    [
        *[(name, "default") for name in ("plain", "isolated", "children", "ends_segfault", "ddp")],
        ("ds2", "frames"),
    ],
)
def test_a_script_is_the_same(name: str, watch: str) -> None:
    # not tmp_path, which is too long for the sockets that multiprocessing makes below TMPDIR
    with tempfile.TemporaryDirectory() as folder:
        [pair] = pairs(NAMED[name], {watch: WATCHES[watch]}, Path(folder) / "work")

    assert (pair.differences, pair.false_verdicts) == ([], [])
