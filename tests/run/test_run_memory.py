"""--memory of `python -m dsdoctor.run`: what counts as running out, where the user's line is, and that off is off."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.ranks.failure import causes_of, read_failure
from dsdoctor.run.__main__ import environment_for, parse_command_line
from dsdoctor.run.memory import CHOICES, MemoryWatch, chosen, out_of_memory
from dsdoctor.run.out_of_memory import of_host, users_line
from dsdoctor.run.script import VARIABLE
from tests.each import each

SAYS = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
]
OTHER = ["size mismatch", "CUDA error: device-side assert triggered", "the dataset memory map is gone"]


def raised(error: BaseException, *, inside: bool) -> BaseException:
    """The error as it was raised, or as the cause of another."""
    try:
        try:
            raise error
        except type(error) as first:
            if not inside:
                raise
            raise RuntimeError("the step failed") from first
    except Exception as caught:
        return caught


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("text", "is_one"), [*((text, True) for text in SAYS), *((text, False) for text in OTHER)])
def test_what_says_that_memory_ran_out(text: str, is_one: bool, inside: bool) -> None:
    assert out_of_memory(read_failure(raised(RuntimeError(text), inside=inside))) is is_one


def test_causes_that_form_a_circle_come_once() -> None:
    first, second = ValueError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first

    assert list(causes_of(first)) == [first, second]
    assert out_of_memory(read_failure(first)) is False


@each(
    ("failure", "told"),
    (
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError(SAYS[2]), True),
        (RuntimeError(SAYS[0]), False),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"), False),
    ),
)
def test_only_what_is_surely_the_hosts_is_explained_by_its_limits(failure: BaseException, told: bool) -> None:
    assert of_host(read_failure(failure)) is told


def test_the_line_is_the_users_and_not_a_packages(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "deep.py"
    package.parent.mkdir()
    package.write_text("def step(): raise RuntimeError('out of memory')\n")
    script = tmp_path / "train.py"
    script.write_text("import deep\n\n\ndef train():\n    deep.step()\n")
    with pytest.raises(RuntimeError) as failure:
        _run(script, package.parent)

    assert users_line(read_failure(failure.value)).endswith("train.py:5 deep.step()")


def _run(script: Path, folder: Path) -> None:
    space: dict[str, object] = {}
    sys.path.insert(0, str(folder))
    try:
        exec(compile(script.read_text() + "\ntrain()\n", str(script), "exec"), space)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("deep", None)


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_reaches_the_script(choice: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    call = parse_command_line(["--memory", choice, str(script)], {})

    assert call.memory == choice
    assert f'"memory": "{choice}"' in environment_for(call, {}, "m:f")[VARIABLE]


def test_another_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="off, oom, trace"):
        chosen("yes")


@pytest.mark.parametrize("choice", ["off", "oom"])
def test_an_engine_is_left_as_it_is_and_other_failures_are_not_ours(choice: str) -> None:
    class Engine:
        pass

    said: list[str] = []
    engine = Engine()
    watch = MemoryWatch(choice, lambda *lines: said.extend(lines))
    watch.engine(engine)
    watch.ended(read_failure(RuntimeError("size mismatch")), None)
    last = RuntimeError("CUDA out of memory") if choice == "off" else ValueError("size")
    watch.ended(read_failure(last), None)

    assert vars(engine) == {}
    assert said == []
    assert len(watch.engines) == (choice == "oom")


@pytest.mark.slow
def test_the_catch_imports_nothing_before_it_is_needed() -> None:
    code = "import sys, dsdoctor.run.memory; print(sorted({'torch', 'msgspec', 'dsdoctor.memory.engine'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
