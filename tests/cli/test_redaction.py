"""Tokens planted in a whole environment: none is in anything that a command shows, writes or keeps."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import run
from tests.each import each
from tests.planted import (
    ADDRESSES,
    COMMANDS,
    EVERY,
    FOLDERS,
    IN_ADDRESSES,
    IN_PATHS,
    WORDINGS,
    Planted,
    plant,
    plant_alone,
    token,
)

MACHINE = Path(__file__).parents[1] / "machines" / "one-toolkit.json"
QUOTING = """#!/bin/sh
echo "nvcc fatal : Unknown option in $NVCC_PREPEND_FLAGS $NVCC_APPEND_FLAGS $CFLAGS $PIP_INDEX_URL" >&2
exit 1
"""
"""A program that fails and quotes its environment, as nvcc and pip do."""

SECRET = "hf_S3cretArgument"
REPOSITORY = f"git+https://u:p@{SECRET}@127.0.0.1:9/own/DeepSpeed.git?token={SECRET}"
INDEX = f"https://u:{SECRET}@127.0.0.1:9/simple?token={SECRET}"
HERE = {
    "look --json": ("machine", "look", "--json"),
    "check --json": ("check", "--offline", "--json"),
    "check": ("check", "--offline"),
    "check --report": ("check", "--offline", "--report"),
    "a plan whose git fails": ("build-wheel", "--dry-run", "--source", REPOSITORY),
    "a plan whose git fails, --json": ("build-wheel", "--dry-run", "--source", REPOSITORY, "--json"),
    "a build whose pip quotes a variable": ("build-wheel", "--torch", "9.9.9", "--torch-index", INDEX),
    "a build whose pip gets no answer": ("build-wheel", "--torch", "9.9.9", "--torch-index", INDEX, "--json"),
}
SAID = {
    "a plan whose git fails": "git could not fetch https://127.0.0.1:9/own/DeepSpeed.git",
    "a plan whose git fails, --json": "git could not fetch https://127.0.0.1:9/own/DeepSpeed.git",
    "a build whose pip quotes a variable": "for no-build-isolation option",
    "a build whose pip gets no answer": "No matching distribution found for torch==9.9.9",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A machine whose nvcc and compiler quote what they are given, and an environment full of tokens."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("nvcc", "g++-13"):
        (folder / name).write_text(QUOTING)
        (folder / name).chmod(0o755)
    everywhere = plant(EVERY, WORDINGS) | plant(ADDRESSES, IN_ADDRESSES, first=len(EVERY) * len(WORDINGS))
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "DSDOCTOR_CACHE": str(folder / "cache"), "PIP_RETRIES": "0"}
    own["PIP_CONSTRAINT"] = os.devnull
    return everywhere | Planted(env=own, tokens={SECRET: "an argument"})


@pytest.mark.slow
@pytest.mark.parametrize("shown", HERE)
def test_nothing_that_is_shown_of_this_machine_holds_a_token(shown: str, planted: Planted) -> None:
    deaf = (*ADDRESSES, "PIP_NO_BUILD_ISOLATION") if "no answer" in shown else ()
    env = {name: value for name, value in planted.env.items() if name not in deaf}

    done = run(*HERE[shown], "--python", sys.executable, **env)

    assert planted.found_in(done.stdout + done.stderr) == []
    assert "Traceback" not in done.stderr
    assert SAID.get(shown, "") in done.stdout + done.stderr


@pytest.mark.slow
def test_a_snapshot_of_this_machine_holds_none_and_is_judged_like_the_machine(planted: Planted, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    recorded = run("machine", "record", str(file), "--offline", "--python", sys.executable, **planted.env)
    here = run("check", "--offline", "--json", "--python", sys.executable, **planted.env)
    there = run("check", "--offline", "--json", "--machine", str(file))

    assert recorded.returncode == 0
    assert planted.found_in(file.read_text() + recorded.stdout + recorded.stderr) == []
    assert "words not shown" in file.read_text()
    rules = [{finding["rule"] for finding in json.loads(done.stdout)["findings"]} for done in (here, there)]
    assert rules[0] == rules[1] >= {"variable-malformed", "ds-variables-set"}


@pytest.mark.slow
@each("wording", IN_PATHS.values(), ids=tuple(IN_PATHS))
def test_what_is_said_of_this_machine_holds_no_token_of_a_path(wording: str, tmp_path: Path) -> None:
    """A Python without torch, and an nvcc in a folder with a token in its name."""
    bare, file, named = tmp_path / "python", tmp_path / "machine.json", token(900)
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    nvcc = tmp_path / named / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    for program in (bare, nvcc):
        program.chmod(0o755)
    others = ("CONDA_PREFIX", "VIRTUAL_ENV", "XDG_CACHE_HOME", "PYENV_ROOT", "LD_LIBRARY_PATH")
    here = plant_alone((*COMMANDS, *FOLDERS, *others), wording)
    here |= Planted(env={"PATH": f"{nvcc.parent}:{os.environ['PATH']}"}, tokens={named: "PATH"})

    told = [
        run(*words, "--python", str(bare), **here.env)
        for words in (
            ("machine", "record", str(file), "--offline"),
            (
                "machine",
                "look",
            ),
            ("check", "--offline"),
            ("machine", "look", "--json"),
        )
    ]

    assert here.found_in(file.read_text()) == []
    assert [here.found_in(done.stdout + done.stderr) for done in told] == [[]] * len(told)


def test_what_a_snapshot_of_an_earlier_version_holds_is_not_shown(tmp_path: Path) -> None:
    listed = {"TORCH_CUDA_ARCH_LIST": 2, "DS_ACCELERATOR": 0}  # at these the plan would end
    planted = plant([name for name in EVERY if name not in listed], WORDINGS)
    file = _machine_with(planted.env, tmp_path / "machine.json")

    shown = [
        run(*command, "--machine", str(file), *json_)
        for command in (
            ("machine", "look"),
            (
                "build-wheel",
                "--dry-run",
            ),
        )
        for json_ in ((), ("--json",))
    ]
    shown += [run("check", "--machine", str(file)), run("machine", "compare", str(MACHINE), str(file), "--json")]
    plan = json.loads(shown[3].stdout)["plan"]

    assert [planted.found_in(done.stdout + done.stderr) for done in shown] == [[]] * len(shown)
    assert [done.returncode for done in shown] == [0, 0, 0, 0, 1, 1]
    titles = [finding["title"] for finding in plan["findings"] if finding["rule"] == "variable-reaches-nvcc"]
    assert [title.partition("(")[0] for title in titles] == [
        f"NVCC_{name}_FLAGS=-O2 -I/opt/x " if name != "FLAGS" else "NVCC_FLAGS=-O2 -I/opt/x "
        for name in ("APPEND", "FLAGS", "PREPEND")
    ]


def _machine_with(env: dict[str, str], file: Path) -> Path:
    """A recorded CUDA machine with variables as an earlier dsdoctor wrote them down: whole."""
    snapshot: dict[str, Any] = json.loads(MACHINE.read_text())
    answers = snapshot["answers"]
    answers.update({f"variable\x1f{name}": value for name, value in env.items()})
    for prefix in ("DS_BUILD_", "NVCC_"):
        answers[f"variables\x1f{prefix}"] = {n: v for n, v in sorted(env.items()) if n.startswith(prefix)}
    file.write_text(json.dumps(snapshot))
    return file


def test_what_is_quoted_of_a_log_holds_no_token() -> None:
    log = (
        "g++ -DKEY=hf_S3cret0001 -c a.cpp\n"
        "ERROR: Could not find a version that satisfies the requirement deepspeed==9"
        " (from https://u:hf_S3cret0002@h/simple?token=hf_S3cret0003)\n"
        "ERROR: No matching distribution found for deepspeed==9 https://u:p@hf_S3cret0004@h/x\n"
    )
    for options in ((), ("--json",), ("--verbose",)):
        done = run("diagnose", "-", *options, stdin=log.encode())

        assert "hf_S3cret" not in done.stdout + done.stderr
        assert "https://h/" in done.stdout
