"""Traces on disk: whole, torn, damaged, of other versions, of several ranks; and which frames are taken from them."""

import os
import tracemalloc
from pathlib import Path

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.frame import CallPhase, Frame, StepEnd
from dsdoctor.overflow.trace.trace_file import (
    Numbers,
    Selection,
    find_batches,
    last_of_each,
    numbers,
    read,
    read_header,
    selected,
    sources,
)
from tests.overflow.on_disk import chain, header, step, trace
from tests.overflow.written import backward, frame, tensor


def places(lines: object) -> list[tuple[int, int, str]]:
    """Rank, batch and module of each frame."""
    return [(rank, line.batch, line.module) for rank, line in lines if isinstance(line, Frame)]  # type: ignore[attr-defined]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lines = (*chain(0, 2.0, 3.0), step(0, overflow=True, loss="nan"))

    path = trace(tmp_path, *lines)

    assert list(read(path)) == [header(), *lines]


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = trace(tmp_path, *chain(0, 2.0, 3.0))
    path.write_bytes(path.read_bytes()[:-30])

    found = sources([path])

    assert places(selected(found, Selection())) == [(0, 0, "h.0")]
    assert found.notes == (f"the last line of {path} is incomplete and was left out: its job died or is still running",)
    assert list(find_batches(path).frames(0)) == [chain(0, 2.0, 3.0)[0]]


def test_a_tail_of_zeros_after_a_crash_of_the_machine_is_a_torn_line(tmp_path: Path) -> None:
    path = trace(tmp_path, *chain(0, 2.0))
    with path.open("ab") as file:
        file.write(b"\0" * 4096)

    assert len(list(read(path))) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello\n", "is not a dsdoctor trace"),
        (b"[1]\n", "is not a dsdoctor trace"),
        (b'"schema"\n', "is not a dsdoctor trace"),
        (b"\x80\x02\x8a\n", "is not a dsdoctor trace"),
        (b'{"schema":"\xff"}\n', "is not a dsdoctor trace"),
        (b"\0" * (1 << 20), "is not a dsdoctor trace"),
        (b'{"t":"header","schema":"dsdoctor/trace/1"', "is not a dsdoctor trace"),
        (b'{"t":"header","schema":"dsdoctor/trace/9","dsdoctor":"9"}\n', "is of version dsdoctor/trace/9"),
        (b'{"t":"header","schema":"dsdoctor/trace/1","dsdoctor":7}\n', "line 1"),
    ],
)
def test_what_is_no_trace_is_a_usage_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace-rank00000.jsonl"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=said):
        sources([path])


@pytest.mark.parametrize("damage", [b"{}\n", b"\xff\n", b'{"t":"frame","batch":0,"module":"\xff"}\n', b"\0\0\n", b"\n"])
def test_damage_before_the_end_is_an_error_with_its_line(tmp_path: Path, damage: bytes) -> None:
    path = trace(tmp_path, *chain(0, 2.0))
    whole = path.read_bytes()
    path.write_bytes(whole + damage + whole.splitlines(keepends=True)[1])

    with pytest.raises(UsageError, match="line 3"):
        list(read(path))


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_header(tmp_path / "none.jsonl")


def test_a_folder_stands_for_its_traces_and_one_named_twice_counts_once(tmp_path: Path) -> None:
    second = trace(tmp_path, *chain(0, 2.0), rank=1, world=2)
    trace(tmp_path, *chain(0, 2.0), rank=0, world=2)
    (tmp_path / "trace-rank00000.txt").write_text("the same in words")

    assert sources([second, tmp_path, tmp_path / "."]).ranks == (0, 1)


def test_an_empty_trace_in_a_folder_is_left_out_and_told(tmp_path: Path) -> None:
    trace(tmp_path, *chain(0, 2.0), world=2)
    empty = tmp_path / "trace-rank00001.jsonl"
    empty.touch()

    found = sources([tmp_path])

    assert (found.ranks, found.notes) == ((0,), (f"{empty} is empty and was left out",))


def test_a_folder_without_a_trace_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no trace"):
        sources([tmp_path])


def test_two_traces_of_one_rank_are_two_runs(tmp_path: Path) -> None:
    first, second = trace(tmp_path / "a", *chain(0, 2.0)), trace(tmp_path / "b", *chain(0, 2.0))

    with pytest.raises(UsageError, match="are both of rank 0") as caught:
        sources([first, second])

    assert f"dsdoctor trace compare {first} {second}" in caught.value.hint


def test_ranks_of_runs_of_different_sizes_are_not_mixed(tmp_path: Path) -> None:
    trace(tmp_path, *chain(0, 2.0), rank=0, world=2)
    trace(tmp_path, *chain(0, 2.0), rank=1, world=8)

    with pytest.raises(UsageError, match="of a run with 2 ranks"):
        sources([tmp_path])


def test_ranks_are_merged_batch_by_batch(tmp_path: Path) -> None:
    for rank in (1, 0):
        trace(tmp_path, *chain(0, 2.0), step(0), *chain(1, 2.0), step(1), rank=rank, world=2)

    lines = list(selected(sources([tmp_path]), Selection()))

    assert places(lines) == [(0, 0, "h.0"), (1, 0, "h.0"), (0, 1, "h.0"), (1, 1, "h.0")]
    assert [rank for rank, line in lines if isinstance(line, StepEnd)] == [0, 1, 0, 1]


INF = frame(0, "h.7.wo", tensor("output", posinf=1), batch=3)
GRADIENT = backward(1, "h.7.wi", tensor("grad output"), batch=3)


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(), True),
        (Selection(modules=("h.7.*",)), True),
        (Selection(modules=("x", "*wo")), True),
        (Selection(modules=("h.7",)), False),
        (Selection(batches=numbers("1-3", "--batch")), True),
        (Selection(batches=numbers("4,5", "--batch")), False),
        (Selection(phase=CallPhase.FORWARD), True),
        (Selection(phase=CallPhase.BACKWARD), False),
        (Selection(bad=True), True),
    ],
)
def test_filters(selection: Selection, taken: bool) -> None:
    assert selection.takes(INF) is taken


def test_the_whole_model_has_the_empty_name() -> None:
    assert Selection(modules=("",)).takes(frame(0, "", tensor("output")))
    assert not Selection(modules=("",)).takes(INF)


def test_ends_of_steps_go_with_their_batch_and_never_with_a_module() -> None:
    assert Selection(bad=True).takes(step(3, overflow=True))
    assert not Selection(bad=True).takes(step(3, overflow=False))
    assert not Selection(modules=("*",)).takes(step(3))
    assert not Selection(batches=Numbers((range(3),))).takes(step(3))


def test_frames_that_are_not_bad_are_not_bad() -> None:
    assert not Selection(bad=True).takes(GRADIENT)


@pytest.mark.parametrize("text", ["", "x", "3,", "-1", "5-3", "1.5", "3;4"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        numbers(text, "--batch")


def test_ranks_that_there_are_no_traces_of(tmp_path: Path) -> None:
    found = sources([trace(tmp_path, *chain(0, 2.0))])

    with pytest.raises(UsageError, match="requested rank"):
        list(selected(found, Selection(ranks=numbers("7", "--rank"))))


def test_the_last_frames_are_the_last_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path, *chain(0, 2.0, 2.0), *chain(1, 2.0, 2.0), step(1), rank=rank, world=2)

    lines = last_of_each(selected(sources([tmp_path]), Selection()), 1)

    assert places(lines) == [(0, 1, "h.1"), (1, 1, "h.1")]


def test_batches_that_interleave_are_found_whole(tmp_path: Path) -> None:
    first, second = chain(0, 2.0, 3.0), chain(1, 4.0)
    late = backward(2, "h.0", tensor("grad output"), batch=0)
    path = trace(tmp_path, *first, *second, late, step(1))

    found = find_batches(path)

    assert found.frames(0) == (*first, late)
    assert found.frames(1) == second
    assert found.frames(2) == ()


def test_memory_stays_flat_however_long_a_trace_is(tmp_path: Path) -> None:
    path = trace(tmp_path, *chain(0, *[2.0] * 50))
    head, *body = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + b"".join(body) * 150)
    found = sources([path])

    tracemalloc.start()
    count = sum(1 for _ in selected(found, Selection(bad=True)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 0
    assert path.stat().st_size > 2_000_000
    assert peak < 300_000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_trace_that_may_not_be_read(tmp_path: Path) -> None:
    path = trace(tmp_path, *chain(0, 2.0))
    path.chmod(0)

    with pytest.raises(UsageError, match="Permission denied"):
        sources([path])
