"""Inputs that nobody means: machine files of every wrong form, and command lines of every wrong word. Each is made of its number.

python -m tests.cli.fuzz machines 0 20000       run these numbers, show each that ends in a traceback
python -m tests.cli.fuzz words 0 20000
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from dsdoctor.cli.app import COMMANDS, make_app
from tests.builder.test_wheel import contents, wheel
from tests.cli.runner import run
from tests.machines.make import HERE as MACHINES

LIMIT_SECONDS = 60
STATUSES = {0, 1, 2, 3, 4, 5, 6}
SNAPSHOTS = sorted(MACHINES.glob("*.json"))
MARK = "DSDOCTOR "
DEEP = 400

TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1e999",
        "NaN",
        "null",
        "9" * 400,
        "²",
        "١٢",
        "12.8",
        "13.0+",
        "8.0;9.0",
        "sm_90",
        ";",
        ",",
        "=",
        ":",
        "/",
        "~",
        "//",
    ),
    *(
        "\x00",
        "\x1b[31m",
        "\u202e",
        "\ufeff",
        "a\nb",
        "\r",
        "%s",
        "{x}",
        "{",
        "${HOME}",
        "'",
        '"',
        "`id`",
        "$(id)",
        "--",
        "-",
        "../../..",
        ".",
    ),
    *(
        "hf_" + "aB3" * 12,
        "https://u:p@h/x?token=y",
        "http://[::1",
        "file:///x",
        "git+https://",
        "C:\\x",
        "\U0001f4a5",
        "x" * 20_000,
    ),
    *(
        "__import__('os')",
        "<script>",
        "[bold]",
        "[/]",
        "nan",
        "inf",
        "True",
        "none",
        "all",
        "default",
        "auto",
        "native",
        "3.12",
        "0.19.8",
    ),
)
SURROGATE = "\udcff"


def value(random: Random, depth: int = 0) -> Any:
    """Anything that JSON can hold, and what it should not."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(TEXTS)
    if kind == 3:
        return random.choice([None, True, False])
    if kind == 4:
        return random.choice([0, -1, 1, 1 << 31, 1 << 63, 1 << 70, -(1 << 64), 10**400])
    if kind == 5:
        return random.choice([float("nan"), float("inf"), -0.0, 1e308, 0.1])
    if kind == 6:
        return "a\ud800b"
    if kind == 7:
        nested: Any = []
        for _ in range(random.choice([5, 90, DEEP])):
            nested = [nested] if random.random() < 0.5 else {"x": nested}
        return nested
    if depth > 2:
        return []
    if kind < 10:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(TEXTS)[:50]: value(random, depth + 1) for _ in range(random.randrange(4))}


def places(part: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, each in inner:
        yield (*above, name)
        if len(above) > 12:
            continue
        yield from places(each, (*above, name))


def mutated(part: Any, random: Random) -> Any:
    """A document with one value replaced, taken out, or swapped with another."""
    found = list(places(part))
    if not found:
        return value(random)
    way, other = random.choice(found), random.choice(found)
    holder = part
    for name in way[:-1]:
        holder = holder[name]
    how = random.randrange(8)
    old = holder[way[-1]]
    if how == 0:
        del holder[way[-1]]
    elif how == 1:
        given = part
        for name in other:
            given = given[name]
        holder[way[-1]] = json.loads(json.dumps(given))
    elif how == 2 and isinstance(old, str):
        at = random.randrange(len(old) + 1)
        holder[way[-1]] = old[:at] + random.choice(TEXTS) + old[at + random.randrange(5) :]
    elif how == 3 and isinstance(old, list):
        holder[way[-1]] = old * random.choice([0, 2, 50])
    elif how == 4 and isinstance(old, str) and MARK in old:
        holder[way[-1]] = _mutated_answer(old, random)
    else:
        holder[way[-1]] = value(random)
    return part


def _mutated_answer(text: str, random: Random) -> str:
    """What a child printed, with something else in its JSON."""
    before, _, answer = text.rpartition(MARK)
    try:
        changed = json.loads(answer)
    except ValueError:
        return text
    for _ in range(random.randrange(1, 4)):
        changed = mutated(changed, random)
    return f"{before}{MARK}{json.dumps(changed)}"


def machine_file(random: Random) -> bytes:
    """A snapshot with something wrong in it."""
    document = json.loads(random.choice(SNAPSHOTS).read_bytes())
    answers = document["answers"]
    told = [name for name, answer in answers.items() if isinstance(answer, dict) and MARK in str(answer.get("stdout"))]
    for _ in range(random.choice([1, 1, 2, 5, 20])):
        how = random.randrange(10)
        if how < 3 and isinstance(answers, dict) and told:
            name = random.choice(told)
            if isinstance(answers.get(name), dict):
                answers[name]["stdout"] = _mutated_answer(str(answers[name].get("stdout", "")), random)
        elif how < 8:
            document["answers"] = answers = mutated(answers, random) if isinstance(answers, dict) else answers
        else:
            document = mutated(document, random)
            answers = document.get("answers") if isinstance(document, dict) else None
        if not isinstance(document, dict) or not isinstance(answers, dict):
            break
    content = json.dumps(document).encode()
    if random.random() < 0.1:
        at = random.randrange(len(content))
        damage = random.choice([b"", b"\x00", b"\xff\xfe", b"]" * 5, b"[" * 100_000, b'"', content[:at]])
        content = content[:at] + damage + content[at + random.randrange(100) :]
    return content


class Place:
    """A folder with one of everything that an argument may name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine, self.bare = folder / "machine.json", folder / "bare-python"
        self.bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        self.bare.chmod(0o755)
        self.machine.write_bytes(SNAPSHOTS[0].read_bytes())
        (folder / "empty").touch()
        (folder / "text").write_text("hello\n")
        (folder / "list.json").write_text("[" * 500 + "]" * 500)
        (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
        (folder / "bytes").write_bytes(bytes(range(256)) * 40)
        (folder / "run.log").write_text("RuntimeError: CUDA out of memory\n")
        (folder / "folder").mkdir()
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "pipe")
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.wheel = wheel(self.wheels, contents(b""))
        trace = MACHINES.parent / "overflow" / "traces" / "fp32"
        shutil.copytree(trace, folder / "trace")
        self.files = [str(path) for path in sorted(folder.iterdir())] + [
            str(folder / "none"),
            str(self.wheel),
            "\udcff",
        ]
        self.env = {
            "HOME": str(folder),
            "DSDOCTOR_CACHE": str(folder / "cache"),
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "90",
        }

    def ask(self, words: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
        done = run(*words, stdin=stdin, **self.env)
        return done.returncode, done.stdout, done.stderr


def machine_words(random: Random, place: Place) -> list[str]:
    """A command that reads a machine file."""
    machine = ["--machine", str(place.machine)]
    ways: list[list[str]] = [
        ["look", *machine],
        [
            "check",
            *machine,
            "--offline",
            random.choice(["-v", "--strict", "--report", "--op=fused_adam", "--arch=9.0"]),
        ],
        ["check", *machine, "--offline"],
        [
            "plan",
            *machine,
            "--offline",
            *random.choice([[], ["-v"], ["--ops", "all"], ["--arch", "8.0"], ["--accelerator", "cpu"]]),
        ],
        ["env", *machine],
        ["compare", str(SNAPSHOTS[1]), str(place.machine)],
        ["verify", str(place.wheel), *machine],
        ["pick", str(place.wheels), *machine],
        ["plan", "--machine", str(SNAPSHOTS[2]), "--offline", "--node", str(place.machine)],
    ]
    return [*random.choice(ways), *(["--json"] if random.random() < 0.3 and "--report" not in ways[1] else [])]


COSTLY = {"comm", "build-wheel", "prebuild", "install", "toolkit", "record", "hang"}
"""They would work for minutes, or on processes of others: they get an option that is refused, or a Python without torch."""
_OPTIONS: dict[str, list[tuple[str, bool]]] = {}


def options_of(name: str) -> list[tuple[str, bool]]:
    """Each option of a command, and whether it takes a value."""
    if name not in _OPTIONS:
        app = make_app()
        for word in name.split():
            app = app[word]
        found = []
        if app.default_command is not None:
            for argument in app.assemble_argument_collection():
                found += [(word, argument.hint is not bool) for word in argument.names if word.startswith("-")]
        _OPTIONS[name] = found
    return _OPTIONS[name]


def command_words(random: Random, place: Place) -> list[str]:
    """A command with options and arguments of any kind."""
    name = random.choice(sorted(COMMANDS))
    words = name.split()
    listed = options_of(name)
    for _ in range(random.randrange(5)):
        option, takes = random.choice(listed) if listed else ("--json", False)
        if option in {"--python", "--source", "--index-url"} and name in COSTLY:
            continue
        words.append(option)
        if takes or random.random() < 0.1:
            words.append(_word(random, place))
    for _ in range(random.randrange(3)):
        words.insert(random.randrange(len(name.split()), len(words) + 1), _word(random, place))
    takes = {option for option, _ in listed}
    if name in COSTLY:
        words.append(
            random.choice(["--no-such-option", "--=", "--jsn"])
            if "--python" not in takes or "--offline" not in takes
            else "--offline"
        )
    if "--python" in takes:
        words += ["--python", str(place.bare)]
    if "--machine" in takes and random.random() < 0.9:
        words += ["--machine", str(place.machine)]
    if "--offline" in takes:
        words.append("--offline")
    return words


def _word(random: Random, place: Place) -> str:
    kind = random.randrange(10)
    if kind < 4:
        return random.choice(TEXTS).replace("\x00", "0")[:2000]
    if kind < 8:
        return random.choice(place.files)
    if kind == 8:
        return str(random.choice([0, 1, -1, 7, 64, 1 << 40, 0.5, -3.5]))
    return random.choice(
        ["8x80G", "0x80G", "2x-1G", "80G", "1:2", "a=b", "rank=1", "overflow", "torch-missing", "fused_adam"]
    ) + random.choice(["", SURROGATE])


def machine_input(number: int, place: Place) -> list[str]:
    """The command line of a number; its machine file is written."""
    random = Random(number)
    place.machine.write_bytes(machine_file(random))
    return machine_words(random, place)


def word_input(number: int, place: Place) -> list[str]:
    return command_words(Random(number), place)


KINDS: dict[str, Callable[[int, Place], list[str]]] = {"machines": machine_input, "words": word_input}


def wrong_with(words: list[str], place: Place) -> str:
    """What is wrong with how a command line ended, "" where nothing is."""
    try:
        with _limited():
            status, out, err = place.ask(words)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error)[-3:])
    if status not in STATUSES:
        return f"status {status}"
    if "check-broken" in out and words[0] == "check" and "--list" not in words:
        return out[out.index("check-broken") - 300 :][:400]
    if "Traceback" in out + err and words[0] not in {"explain", "diagnose"}:
        return (out + err)[-500:]
    if "\x1b" in (out + err).replace("\x1b[0m", "") and words[0] != "env":
        return "an escape sequence came out"
    if "--json" in words and "--html" not in words and status in {0, 1}:
        try:
            json.loads(out)
        except ValueError:
            return f"no document: {out[:200]!r}"
    return ""


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def failures(kind: str, numbers: range) -> Iterator[tuple[int, list[str], str]]:
    """Each number that ended wrongly, its command line, and how."""
    with tempfile.TemporaryDirectory() as folder:
        place, before = Place(Path(folder)), Path.cwd()
        os.chdir(place.folder / "folder")
        try:
            for number in numbers:
                words = KINDS[kind](number, place)
                if wrong := wrong_with(words, place):
                    yield number, words, wrong
        finally:
            os.chdir(before)


def main() -> int:
    kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    count = 0
    for number, words, wrong in failures(kind, range(first, last)):
        count += 1
        print(f"== {kind} {number}: {' '.join(words)!a}\n{wrong}", flush=True)
    print(f"{kind}: {last - first} inputs, {count} ended wrongly")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
