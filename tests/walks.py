"""The walk of a command through our files: ``python -m tests.walks`` prints how many a reader opens, and how often one again.

A reader follows the calls from file to file, in the order in which each function is called first from another file; what a file
calls of itself is read there. A return is a step into a file that was left before. The lower rooms are words, not places: a walk
counts the command's own room, and the rooms that are named beside it.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from tests.cli.runner import run
from tests.source import PACKAGE

HERE = Path(__file__).parent
MACHINE = str(HERE / "machines" / "container-without-gpu.json")
WALKS = {
    "a diagnosis": (
        ("diagnose", str(HERE / "diagnosis" / "real" / "checkpoint-missing-shard.log")),
        ("cli/diagnose", "diagnosis"),
    ),
    "a build's order": (("plan", "--machine", MACHINE), ("cli/plan", "builder", "probe/observe")),
    "a configuration": (("config", "CONFIG", "--world", "4"), ("cli/config", "config")),
    "a checkpoint": (("checkpoint", "FOLDER"), ("cli/checkpoint", "checkpoint")),
}


def steps(call: Callable[[], object]) -> Iterator[str]:
    """The file of each function that is called from another file of ours, in the order of the first calls."""
    root, called = f"{PACKAGE}{os.sep}", {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(root) or frame.f_code.co_name.startswith(("<", "__")):
            return
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            called.setdefault((file, frame.f_code.co_qualname), None)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return (file.removeprefix(root) for file, _ in called)


def walk(files: Iterable[str], rooms: tuple[str, ...]) -> tuple[list[str], int]:
    """The files that are opened, in their order, and how often one is opened again."""
    opened: list[str] = []
    again, last = 0, ""
    for file in files:
        if file != last and file.startswith(rooms):
            again += file in opened
            opened += [] if file in opened else [file]
            last = file
    return opened, again


def main() -> None:
    """A walk in one line, its files below."""
    from tests.checkpoint.written import Kind, write

    with tempfile.TemporaryDirectory() as folder:
        (config := Path(folder) / "ds_config.json").write_text(
            '{"train_batch_size": 8, "gradient_acumulation_steps": 2}'
        )
        write(Path(folder) / "checkpoint", Kind(stage=2))
        places = {"CONFIG": str(config), "FOLDER": f"{folder}/checkpoint"}
        for name, (words, rooms) in WALKS.items():
            arguments = [places.get(word, word) for word in words]
            run(*arguments)  # what is made once is made
            opened, again = walk(steps(lambda words=arguments: run(*words)), rooms)  # type: ignore[misc]
            print(f"{name}: {len(opened)} files, {again} returns\n    {' '.join(opened)}")


if __name__ == "__main__":
    main()
