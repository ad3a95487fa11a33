"""Many targets as a user meets them, built with the machine's real gcc by interpreters that play torch's part."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.build_targets import targets_of
from dsdoctor.cli.matrix import TargetRow, found_lines, table_lines
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.processes import state_of
from tests.cli.runner import run

HERE = Path(__file__).parents[1]
PLAYER = HERE / "builder" / "interpreter.py"

TAG = re.compile(r"\.b[0-9a-f]{8}(?=-)")


class Lab:
    """A DeepSpeed of one-line ops, and environments of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.cache = folder, folder / "dist", folder / "cache"
        shutil.copy(PLAYER, folder / "player.py")
        ops = {"one": "int one(void) { return 1; }", "bad": "#include <no_such_header.h>", "slow": ""}
        files = {"setup.py": "", "setup.cfg": "", "version.txt": "1.0", "op_builder/all_ops.py": ""}
        for name, text in {**files, **{f"csrc/{op}.c": text for op, text in ops.items()}}.items():
            path = folder / "DeepSpeed" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def environment(self, torch: str, op: str) -> str:
        """The interpreter of an environment with a torch, whose DeepSpeed has one op."""
        python = self.folder / f"{torch}-{op}" / "python"
        python.parent.mkdir()
        python.write_text(f"#!{sys.executable} -IS\n{(HERE / 'environment.py').read_text()}")
        python.chmod(0o755)
        (python.parent / "TORCH").write_text(f"{torch} {op}")
        return str(python)

    def arguments(self, *pythons: str) -> list[str]:
        named = [word for python in pythons for word in ("--python", python)]
        return ["build-wheel", "--source", str(self.folder / "DeepSpeed"), "--ops", "all", "-o", str(self.out), *named]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.slow
def test_one_that_fails_and_one_that_is_impossible_do_not_stop_the_others(lab: Lab) -> None:
    empty = lab.folder / "python"
    empty.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    empty.chmod(0o755)
    wanted = [
        str(empty),
        *(lab.environment(torch, op) for torch, op in (("2.12.0", "bad"), ("2.13.0", "one"), ("2.14.1", "one"))),
    ]
    arguments = [*lab.arguments(*wanted), "--index", str(lab.folder / "index"), "--json"]

    done = run(*arguments, DSDOCTOR_CACHE=str(lab.cache))

    document: dict[str, Any] = json.loads(done.stdout)
    impossible, bad, *good = document["targets"]
    assert (done.returncode, [one["target"] for one in document["targets"]]) == (4, wanted)
    assert (impossible["wheel"], bad["wheel"], bad["ops"][0]["built"]) == (None, None, False)
    assert {one["target"] for one in document["findings"] if one["rule"] == "op-failed"} == {wanted[1]}
    assert [TAG.sub("", Path(one["wheel"]).name) for one in good] == [
        f"deepspeed-1.0+cpu.torch2.{minor}-cp311-cp311-linux_x86_64.whl" for minor in (13, 14)
    ]
    for one in good:
        content = Path(one["wheel"]).read_bytes()
        assert (one["size"], one["sha256"]) == (len(content), sha256(content).hexdigest())
        assert (lab.folder / "index" / "deepspeed" / Path(one["wheel"]).name).exists()
    assert list((lab.cache / "builds").glob("[!.]*")) == []


@pytest.mark.slow
def test_two_whose_wheels_would_have_one_name_are_refused_before_anything_is_made(lab: Lab) -> None:
    pythons = [lab.environment("2.13.0", "one"), lab.environment("2.13.1", "one")]

    done = run(*lab.arguments(*pythons), "--local-version", "mine", DSDOCTOR_CACHE=str(lab.cache))
    named = run(
        *lab.arguments(),
        "--torch",
        "2.13.0+cpu",
        "--torch",
        "2.14.1",
        "--local-version",
        "x",
        DSDOCTOR_CACHE=str(lab.cache),
    )

    plain = ("--torch", "2.13.0", "--torch", "2.13.0+cpu", "--no-local-version")
    unversioned = run(*lab.arguments(), *plain, DSDOCTOR_CACHE=str(lab.cache))

    assert (done.returncode, named.returncode, unversioned.returncode) == (2, 2, 2)
    assert f"the wheels for {pythons[0]} and for {pythons[1]} would have the same file name" in done.stderr
    assert "torch2.13.0+cpu and for py" in named.stderr
    assert not lab.cache.exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_of_them(lab: Lab) -> None:
    pythons = [lab.environment(torch, "slow") for torch in ("2.13.0", "2.14.1")]
    env = {**os.environ, "DSDOCTOR_CACHE": str(lab.cache)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", *lab.arguments(*pythons)], env=env, stderr=subprocess.PIPE, text=True
    )
    building = [Path(python).parent / "building" for python in pythons]
    for _ in range(300):
        if all(path.exists() and path.read_text() for path in building):
            break
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert (process.returncode, "Traceback" in err) == (130, False)
    assert err.splitlines()[-1].startswith("✗ interrupted")
    assert [pid for pid in map(int, (path.read_text() for path in building)) if state_of(pid) not in {"", "Z"}] == []
    assert list((lab.cache / "builds").glob("[!.]*")) == []
    assert list(lab.out.iterdir()) == []


@pytest.mark.slow
def test_a_plan_for_each(lab: Lab) -> None:
    pythons = [lab.environment(torch, "one") for torch in ("2.13.0", "2.14.1")]

    done = run(*lab.arguments(*pythons), "--dry-run", DSDOCTOR_CACHE=str(lab.cache))

    assert done.returncode == 0
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert heads == [f"{python}:" for python in pythons]
    assert "+cpu.torch2.14" in done.stdout
    assert list(lab.out.iterdir()) == []


@pytest.mark.parametrize("option", [("--cuda", "12.8"), ("--torch-index", "https://x.invalid")])
def test_what_chooses_a_torch_needs_one(option: tuple[str, str]) -> None:
    done = run("build-wheel", *option)

    assert (done.returncode, "needs --torch" in done.stderr) == (2, True)


def test_one_environment_is_one_target_however_often_it_is_named() -> None:
    two = ("/bin/sh", sys.executable)
    assert [one.python for one in targets_of((*two, "/bin/sh"), (), (), None)] == list(two)
    assert [one.python for one in targets_of((), (), (), None)] == [sys.executable]


def test_the_table_has_a_line_for_each() -> None:
    built = TargetRow(
        target="py3.12 torch2.13.0", wheel="w.whl", size=3 << 20, seconds=41, cpu_seconds=66, sha256="ab12"
    )

    lines = list(table_lines((built, TargetRow(target="py3.9", because="there is no torch 2.13.0 for it"))))

    assert lines == [
        "  target              MiB  seconds  CPU-seconds  wheel  sha256",
        "✓ py3.12 torch2.13.0  3.0       41           66  w.whl  ab12",
        "✗ py3.9               no wheel: there is no torch 2.13.0 for it",
    ]


def test_what_is_wrong_with_all_is_said_once() -> None:
    both, one = (Finding(rule="r", severity=Severity.WARNING, title=title) for title in ("cold", "damp"))

    lines = list(found_lines([("a", (both, one)), ("b", (both,))]))

    assert lines == ["! cold  [r]", "! damp  [r]", "    of a"]


@pytest.mark.slow
def test_what_did_not_change_is_neither_packed_nor_proven_again(lab: Lab) -> None:
    arguments = [*lab.arguments(lab.environment("2.13.0", "one"), lab.environment("2.14.1", "one")), "--json"]

    first, second = (json.loads(run(*arguments, DSDOCTOR_CACHE=str(lab.cache)).stdout)["targets"] for _ in range(2))
    (lab.folder / "DeepSpeed" / "csrc" / "one.c").write_text("int one(void) { return 11; }")
    third = json.loads(run(*arguments, DSDOCTOR_CACHE=str(lab.cache)).stdout)["targets"]

    assert [target["wheel"] for target in second] == [target["wheel"] for target in first]
    assert all(target["seconds"] > 0 for target in (*first, *third))
    assert [target["seconds"] for target in second] == [0.0, 0.0]
    assert {target["sha256"] for target in third}.isdisjoint(target["sha256"] for target in first)
