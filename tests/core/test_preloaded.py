"""A real interpreter that has begun beforehand; its torch is a stand-in, for loading ops needs no more of it here."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.core.children import PreloadedPython


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """An interpreter whose torch writes down who imports it."""
    torch = tmp_path / "torch.py"
    torch.write_text(f"import os\nopen({str(tmp_path / 'imports')!r}, 'a').write(f'{{os.getpid()}}\\n')\n")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec python3 -S "$@"\n')
    interpreter.chmod(0o755)
    yield interpreter


def imports(python: Path) -> list[int]:
    file = python.with_name("imports")
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def load(
    preloaded: PreloadedPython, *libraries: str, env: dict[str, str] | None = None
) -> tuple[int | None, dict[str, str]]:
    """What becomes of loading files that are no libraries, by the script that tries it."""
    pairs, lines = json.dumps([[name, name] for name in libraries]), list[str]()
    whole = {**os.environ, **(env or {})}
    status = preloaded.run("load_ops.py", pairs, folder=Path("/"), env=whole, on_line=lines.append, silence=60)
    answers = [line.removeprefix("DSDOCTOR ") for line in lines if line.startswith("DSDOCTOR ")]
    return status, json.loads(answers[-1]) if answers else {}


def test_many_questions_are_answered_with_one_import(python: Path) -> None:
    with PreloadedPython(str(python)) as preloaded:
        preloaded.start()
        first, second = load(preloaded, "/no/such.so"), load(preloaded, "/etc/passwd", "/no/other.so")

    assert (first[0], list(first[1])) == (0, ["/no/such.so"])
    assert (second[0], list(second[1])) == (0, ["/etc/passwd", "/no/other.so"])
    assert "such.so" in first[1]["/no/such.so"]
    assert len(imports(python)) == 1


def test_a_script_that_ends_badly_ends_alone(python: Path) -> None:
    with PreloadedPython(str(python)) as preloaded:
        preloaded.start()
        lines: list[str] = []
        # no argument: the script has an IndexError
        status = preloaded.run("load_ops.py", folder=Path("/"), env=os.environ, on_line=lines.append, silence=60)
        after = load(preloaded)

    assert status == 1
    assert any("IndexError" in line for line in lines)
    assert after == (0, {})


def test_what_only_a_new_interpreter_takes_is_not_asked_here(python: Path) -> None:
    with PreloadedPython(str(python)) as preloaded:
        preloaded.start()

        assert load(preloaded, env={"LD_LIBRARY_PATH": "/another"}) == (None, {})
        assert load(preloaded, env={"CUDA_HOME": "/another"}) == (0, {})


@pytest.mark.parametrize("how", ["never started", "no such interpreter", "torch is broken", "killed"])
def test_where_it_cannot_answer_it_says_so_and_stays_silent(how: str, python: Path) -> None:
    if how == "torch is broken":
        python.with_name("torch.py").write_text("raise ImportError('libcudart.so.13')\n")
    with PreloadedPython("/no/such/python" if how == "no such interpreter" else str(python)) as preloaded:
        if how != "never started":
            preloaded.start()
        if how == "killed":
            assert load(preloaded) == (0, {})
            os.kill(imports(python)[0], signal.SIGKILL)

        assert load(preloaded)[0] is None
        assert load(preloaded)[0] is None


def test_nothing_is_left_of_one_that_was_never_asked(python: Path) -> None:
    with PreloadedPython(str(python)) as preloaded:
        preloaded.start()
        until = time.monotonic() + 60
        while not imports(python) and time.monotonic() < until:
            time.sleep(0.02)
        (pid,) = imports(python)
        assert Path(f"/proc/{pid}").exists()

    # a zombie is over, too: whoever has adopted it has not looked yet
    assert not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
