"""What the tool says of everything that the tests keep, in one archive, so that a change that should change nothing can show it.

    python -m tests.frozen write ARCHIVE.tar.gz     run everything and keep each answer: exit status, stdout, stderr
    python -m tests.frozen compare ARCHIVE.tar.gz   run everything again; each answer that differs is shown, exit status 1

Run it in the environment of the README's test command: the installed DeepSpeed, or its absence, is part of the answers. The
archive is written outside of the tree. What differs by place or release is masked before it is kept: the folder of the inputs,
this checkout and dsdoctor's version. Files are made with one time, so nothing else needs a mask.
"""

import argparse
import difflib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import dsdoctor
from dsdoctor.cli.app import COMMANDS
from dsdoctor.core.release import __version__
from dsdoctor.ui.screen import screen_lines
from tests.builder.test_wheel import INFO, NAME, RECORD, VERSION, contents, wheel
from tests.checkpoint.test_folder import DAMAGES
from tests.checkpoint.written import KINDS, write
from tests.cli.runner import run
from tests.config.cases import bad, healthy
from tests.config.posted import posted
from tests.config.recorded import verdicts

HERE = Path("tests")
MACHINES = HERE / "machines"
"""Seen from the checkout, in which all is asked: a longer path would break lines elsewhere."""
LOGS = ("blind", "fresh", "later", "logs", "real", "threads")
LOGS += ("unseen", "unseen_second", "unseen_third", "unseen_fourth", "unseen_fifth", "unseen_sixth", "unseen_seventh")
Answer = tuple[str, str]


def answers(folder: Path) -> Iterator[Answer]:
    """The name of each question, and its masked answer. ``folder`` is where inputs are made."""
    for part in (helps, rules, machines, logs, configurations, checkpoints, traces, wheels):
        for name, answer in part(folder):
            yield f"{part.__name__}/{name}", _masked(answer, folder)


def ask(*arguments: str) -> str:
    done = run(*arguments, COLUMNS="100", NO_COLOR="1", HOME="/nonexistent")
    return f"exit {done.returncode}\n-- stdout\n{done.stdout}\n-- stderr\n{done.stderr}"


def both(name: str, *arguments: str) -> Iterator[Answer]:
    """The answer as text, with everything, and as JSON."""
    yield f"{name}.txt", ask(*arguments)
    yield f"{name}.json", ask(*arguments, "--json")


def helps(folder: Path) -> Iterator[Answer]:
    """The help of every command, and of the two modules that are started by their names."""
    yield "dsdoctor", ask("--help")
    for command in COMMANDS:
        yield command.replace(" ", "-"), ask(*command.split(), "--help")
    for module in ("dsdoctor.run", "dsdoctor.comm"):
        argv, env = [sys.executable, "-m", module, "--help"], {**os.environ, "COLUMNS": "100"}
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        yield module, f"exit {done.returncode}\n{done.stdout}{done.stderr}"


def rules(folder: Path) -> Iterator[Answer]:
    """The manual page of every rule."""
    listed = ask("explain", "--list", "--json")
    yield "list", listed
    document = json.loads(listed.split("-- stdout\n")[1].split("\n-- stderr")[0])
    for rule in document["rules"]:
        yield from both(rule, "explain", rule)


def machines(folder: Path) -> Iterator[Answer]:
    """What is said of every recorded machine, and of each beside the first."""
    files = sorted(MACHINES.glob("*.json"))
    for file in files:
        machine = ("--machine", str(file), "--offline")
        yield from both(f"{file.stem}.check", "check", "-v", *machine)
        yield from both(f"{file.stem}.plan", "build-wheel", "--dry-run", "-v", *machine)
        yield from both(f"{file.stem}.look", "machine", "look", "--machine", str(file))
        yield from both(f"{file.stem}.env", "env", "--machine", str(file))
        yield from both(f"{file.stem}.compare", "machine", "compare", str(files[0]), str(file))
        yield f"{file.stem}.report", ask("check", "--report", *machine)


def logs(folder: Path) -> Iterator[Answer]:
    """The diagnosis of every log."""
    for name in LOGS:
        for file in sorted((HERE / "diagnosis" / name).rglob("*.log")):
            yield from both(str(file.relative_to(HERE / "diagnosis")), "diagnose", str(file))


def configurations(folder: Path) -> Iterator[Answer]:
    """What is judged of every configuration, given what DeepSpeed answered (recorded)."""
    cases = [(f"{number:04}", case.config) for number, case in enumerate((*bad(), *healthy(), *posted()))]
    for name, config in cases:
        findings = tuple(verdict.finding for verdict in verdicts(config))
        yield name, f"{json.dumps(config, default=str)}\n{chr(10).join(screen_lines(findings))}\n{findings!r}"


def checkpoints(folder: Path) -> Iterator[Answer]:
    """Every kind of checkpoint, whole and with each damage of each file of one of them."""
    for kind in KINDS:
        place = folder / "checkpoints" / kind.name.replace(" ", "-")
        tag = write(place, kind)
        yield from both(place.name, "checkpoint", str(place))
        if kind is KINDS[6]:
            for file in sorted(tag.iterdir()):
                for name, damage in DAMAGES.items():
                    content = file.read_bytes()
                    damage(file)
                    yield from both(f"{place.name}.{file.name}.{name}", "checkpoint", str(place))
                    file.unlink(missing_ok=True)
                    file.write_bytes(content)


def traces(folder: Path) -> Iterator[Answer]:
    """Every trace: shown, compared, its headroom."""
    files = sorted((HERE / "overflow" / "traces").rglob("*.jsonl"))
    for file in files:
        yield from both(f"{file.parent.name}.show", "trace", "show", str(file))
        yield from both(f"{file.parent.name}.headroom", "trace", "show", str(file), "--headroom", "float16")
    yield from both("compare", "trace", "compare", *map(str, files))


def wheels(folder: Path) -> Iterator[Answer]:
    """Wheels made here, healthy, foreign and damaged, against every recorded machine."""
    place = folder / "wheels"
    place.mkdir()
    (place / "x.c").write_text("int f(int x) { return x + 1; }")
    gcc = ["gcc", "-shared", "-fPIC", "-march=x86-64", "-mavx2", "-Wl,--build-id=none", "-o", "x.so", "x.c"]
    subprocess.run(gcc, cwd=place, check=True)
    library = (place / "x.so").read_bytes()
    later = VERSION.replace("0.19.8", "0.19.9")
    other = RECORD.replace("'version': '2.14'", "'version': '2.13'").replace("0.19.8", "0.19.9").encode()
    evil = {"torch/__init__.py": b"", f"{INFO.replace('dist-info', 'data')}/scripts/python": b"#!python\n"}
    with patch.object(zipfile.time, "localtime", lambda *_: zipfile.time.gmtime(1_700_000_000)):
        made = {
            "healthy": wheel(_new(place / "healthy"), contents(library)),
            "foreign": wheel(_new(place / "foreign"), contents(library, **evil)),
            "other-torch": wheel(
                _new(place / "other"),
                contents(
                    library,
                    version=later,
                    **{"deepspeed/git_version_info_installed.py": other},
                ),
                NAME.replace("0.19.8", "0.19.9"),
            ),
        }
    made["truncated"] = _new(place / "truncated") / NAME
    made["truncated"].write_bytes(made["healthy"].read_bytes()[:-400])
    for name, file in made.items():
        for machine in sorted(MACHINES.glob("*.json")):
            yield from both(f"{name}.{machine.stem}", "verify", str(file), "--machine", str(machine))
    for machine in sorted(MACHINES.glob("*.json")):
        yield from both(f"pick.{machine.stem}", "pick", str(place / "healthy"), "--machine", str(machine))


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _masked(answer: str, folder: Path) -> str:
    answer = answer.replace(str(folder), "FOLDER").replace(str(Path(dsdoctor.__file__).parents[1]), "CHECKOUT")
    return answer.replace(__version__, "VERSION")


def write_archive(file: Path) -> int:
    """Keep every answer; the number of them."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(file, "w:gz", compresslevel=6) as archive:
        number = 0
        for name, answer in answers(Path(folder)):
            number += 1
            entry = tarfile.TarInfo(name)
            content = answer.encode("utf-8", "surrogateescape")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return number


def differences(file: Path) -> Iterator[tuple[str, str]]:
    """The name of each answer that differs, is new or is missing, and how."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(file) as archive:
        kept = {entry.name: archive.extractfile(entry).read().decode("utf-8", "surrogateescape") for entry in archive}  # type: ignore[union-attr]
        for name, answer in answers(Path(folder)):
            before = kept.pop(name, None)
            if before != answer:
                lines = difflib.unified_diff(
                    (before or "").splitlines(), answer.splitlines(), "before", "now", lineterm="", n=1
                )
                yield name, "new" if before is None else "\n".join(lines)
        yield from ((name, "no longer asked") for name in kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("archive", type=Path)
    asked = parser.parse_args()
    asked.archive = asked.archive.absolute()
    os.chdir(Path(dsdoctor.__file__).parents[1])
    if asked.what == "write":
        print(f"{write_archive(asked.archive)} answers in {asked.archive}")
        return 0
    differing = 0
    for name, how in differences(asked.archive):
        differing += 1
        print(f"== {name}\n{how}")
    print(f"{differing} answers differ" if differing else "no answer differs")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
