"""The folder for what ranks wrote that failed, and what is let in there of a file that another host sends: names and sizes."""

import re
from collections.abc import Mapping
from pathlib import Path

from dsdoctor.core.files import PRIVATE, make_folder, write_text

FOLDER = "evidence"
LARGEST = 1 << 16
MOST_FILES = 64
NAME = re.compile(r"rank-\d{5,7}\.(?:log|stack\.txt|flight\.json|nccl\.log)", re.ASCII)


def write_files(folder: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Write files into the folder's ``evidence``, those with another name than ours left out; the paths."""
    wanted = [(name, text) for name, text in files.items() if NAME.fullmatch(name) and text][:MOST_FILES]
    if wanted:
        make_folder(folder / FOLDER, mode=0o700)
    for name, text in wanted:
        write_text(folder / FOLDER / name, text[-LARGEST:], mode=PRIVATE, errors="replace")
    return tuple(str(folder / FOLDER / name) for name, _ in wanted)
