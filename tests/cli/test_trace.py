"""``dsdoctor trace`` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import run
from tests.overflow.on_disk import chain, step, trace
from tests.overflow.written import frame, tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, two batches; rank 1's second batch holds an inf."""
    for rank in (0, 1):
        bad = frame(1, "h.1", tensor("input[0]"), tensor("output", posinf=rank), batch=1, rank=rank)
        lines = (*chain(0, 2.0, 3.0), step(0), chain(1, 2.0)[0], bad, step(1, overflow=True))
        trace(tmp_path, *lines, rank=rank, world=2)
    return tmp_path


def test_help_teaches() -> None:
    shown = run("trace", "--help").stdout

    assert "dsdoctor trace compare dsdoctor-trace --batch-a 149 --batch-b 150" in shown
    assert [name for name in ("show", "compare", "plot") if f"│ {name} " in shown] == [
        "show",
        "compare",
        "plot",
    ]


def test_showing_what_is_bad(folder: Path) -> None:
    done = run("trace", "show", str(folder), "--bad")

    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "                  *** Step 1 after batch 1 rank=0: overflow, skipped ***",
        "",
        "",
        "                  *** Starting batch number=1 rank=1 ***",
        "abs min  abs max  metadata",
        "                  h.1 Linear",
        "5.00e-01 3.00e+00 input[0]",
        "5.00e-01      inf output",
        "                  *** Step 1 after batch 1 rank=1: overflow, skipped ***",
    ]
    assert done.stderr.startswith(f"{folder}/trace-rank00000.jsonl: rank 0 of 2, float16")


def test_showing_nothing_says_so(folder: Path) -> None:
    done = run("trace", "show", str(folder), "--module", "x.*")

    assert (done.returncode, done.stdout) == (0, "")
    assert "· nothing matches these filters" in done.stderr


def test_showing_is_one_document_even_when_a_trace_is_damaged(folder: Path) -> None:
    path = folder / "trace-rank00000.jsonl"
    path.write_bytes(path.read_bytes() + b"{}\n{}\n")

    done = run("trace", "show", str(path), "--json")

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"], len(document["lines"])) == (2, "trace show", 6)
    assert "line 8" in document["findings"][0]["title"]


def test_comparing_two_ranks_finds_the_inf(folder: Path) -> None:
    done = run("trace", "compare", str(folder), "--rank-a", "0", "--rank-b", "1", "--json")

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"]) == (1, "trace compare")
    first = document["comparison"]["first"]
    assert (first["what"], first["ratio"], first["place"]["module"], first["place"]["b"]) == (
        "nan or inf",
        None,
        "h.1",
        {"rank": 1, "batch": 1},
    )


def test_comparing_what_is_alike(folder: Path) -> None:
    done = run("trace", "compare", str(folder), str(folder), "--batch-a", "0")

    assert (done.returncode, done.stdout) == (0, "✓ no divergence: 12 tensors in 2 batches agree\n")


def test_headroom_lists_what_does_not_fit(tmp_path: Path) -> None:
    path = trace(tmp_path, *chain(0, 9.0, 1e5, dtype="bfloat16"))

    done = run("trace", "show", str(path), "--headroom", "float16", "--json")

    document = json.loads(done.stdout)
    assert (done.returncode, document["headroom"]["keep"], document["headroom"]["limit"]) == (1, ["h.1"], 65504.0)
    assert run("trace", "show", str(path), "--headroom", "bfloat16").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "{}/none.jsonl"),
        ("show", "{}", "--batch", "x"),
        ("show", "{}", "--rank", "7"),
        ("show", "{}", "--phase", "sideways"),
        ("compare", "{}"),
        ("compare", "{}", "--batch-a", "0", "--batch-b", "0"),
        ("compare", "{}", "{}", "--tolerance", "0.5"),
        ("compare", "{}", "{}", "--module", "x"),
        ("show", "{}", "--headroom", "int8"),
        ("show", "{}", "--headroom", "float16", "--margin", "inf"),
        ("show", "{}", "--headroom", "float16", "--module", "x"),
        ("show", "{}", "--headroom", "float16", "--bad"),
        ("show", "{}", "--margin", "1"),
        ("show", "{}", "--all"),
        ("plot", "{}", "-o", "page.txt"),
        ("plot", "{}", "--phase", "all"),
        ("plot", "{}", "--dtype", "float3"),
    ],
)
def test_nonsense_is_a_usage_error(folder: Path, arguments: tuple[str, ...]) -> None:
    given = [argument.replace("{}", str(folder)) for argument in arguments]

    done = run("trace", *given)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("✗") == 1
    assert json.loads(run("trace", *given, "--json").stdout)["findings"][0]["rule"] == "usage"


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    path = trace(tmp_path, *(one for batch in range(2000) for one in chain(batch, 2.0, 3.0)))
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", "trace", "show", str(path)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        os.read(reading, 100)
        os.close(reading)
        _, stderr = process.communicate(timeout=30)

    assert "Traceback" not in stderr
    assert process.returncode == -13
