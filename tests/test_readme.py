"""Every command of the README is run, as it stands there, in a folder that has the files which it names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.written import Kind, write

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"`([^`\n]*)`|^ *(?:next: )?\$ (.*)$", re.MULTILINE)
OURS = re.compile(r"dsdoctor [a-z-]+|dsdoctor\.run|-m pytest")
ELSEWHERE = {
    'python -m pip install -e ".[build]" && python -m dsdoctor build-wheel': "tests/wheel/test_real_wheels.py",
    'python -m pip install -e ".[test]" && python -m pytest': ".ci/run",
    "python -m dsdoctor install": "tests/wheel/test_install.py",
    'export CUDA_HOME="$(python -m dsdoctor toolkit)"': "tests/cli/test_cli.py",
    "python -m dsdoctor build-wheel": "tests/wheel/test_real_wheels.py",
    "torchrun --nproc_per_node 2 -m dsdoctor.run --hang-after 8 --on-hang stop train.py": "docs/make_samples.py",
}
"""What installs or compiles, or is run for its output: where that happens. A word of each command stands there."""
STATUS = {
    "python -m dsdoctor check": (0, 1),
    "python -m dsdoctor check --machine tests/machines/container-without-gpu.json": (1,),
    "python -m dsdoctor diagnose train.log": (1,),
    "python -m dsdoctor diagnose tests/diagnosis/unseen_fifth/13-oom-at-save-tqdm.log": (1,),
    "dsdoctor check": (0, 1),
    "dsdoctor run": (2,),
    "python -m dsdoctor comm": (0, 6),
    "deepspeed --module dsdoctor.run train.py": (0,),
    "deepspeed train.py": (0,),
    "python -m dsdoctor config ds_config.json --world 8": (1,),
    "python -m dsdoctor memory --config ds_config.json --model CONFIG.json --world 8 --gpus 8x80G": (0, 1),
    "python -m dsdoctor checkpoint output/checkpoint-500 --world 16": (0, 1),
    "python -m dsdoctor.run script.py": (0,),
    "dsdoctor explain cuda-home-wrong": (0,),
}


def commands() -> list[str]:
    """The README's commands, with something for each placeholder."""
    found = [span or line for span, line in SHOWN.findall(README)]
    found += re.findall(r"^python -m pip .*$", README, re.MULTILINE)
    found = [
        each.replace(" ...", "").replace(" [options]", "").replace("explain ID", "explain cuda-home-wrong")
        for each in found
    ]
    kept = [each for each in found if OURS.search(each) or each.startswith("deepspeed ")]
    return list(dict.fromkeys(each for each in kept if "=" not in each.split()[0]))


def test_every_command_of_the_readme_is_known_here() -> None:
    assert set(commands()) == set(STATUS) | set(ELSEWHERE)
    for command, place in ELSEWHERE.items():
        word = re.sub(r".*dsdoctor ([a-z-]+).*", r"\1", command) if "dsdoctor " in command else ""
        assert word in (ROOT / place).read_text(encoding="utf-8"), command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the README names."""
    made = tmp_path_factory.mktemp("readme")
    samples = ROOT / "docs" / "samples"
    shutil.copy(samples / "ds_config.json", made)
    (made / "sound").mkdir()
    shutil.copy(samples / "zero2.json", made / "sound" / "ds_config.json")
    shutil.copy(samples / "llama3-8b.json", made / "sound" / "CONFIG.json")
    (made / "tests").symlink_to(ROOT / "tests")
    (made / "train.log").write_text(
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'deepspeed'\n"
    )
    for name in ("train.py", "script.py"):
        (made / name).write_text('print("trained")\n')
    write(made / "output" / "checkpoint-500", Kind())
    programs = made / "bin"
    programs.mkdir()
    (programs / "dsdoctor").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsdoctor "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "deepspeed").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deepspeed.launcher.runner "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return made


@pytest.mark.launch
@pytest.mark.parametrize("command", STATUS)
def test_a_command_of_the_readme_does_what_it_says(command: str, folder: Path) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

    done = subprocess.run(
        ["bash", "-c", command],
        # DeepSpeed refuses the configuration that `config` is shown with
        cwd=folder / "sound" if "memory" in command else folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode in STATUS[command], (done.stdout + done.stderr)[-3000:]
    assert "Traceback (most recent call last)" not in done.stderr
    if "train.py" in command or "script.py" in command:
        assert "trained" in done.stdout
