"""checkpoint --merge: the weights of a whole tag -> one model in safetensors, with Hugging Face's index; resumable."""

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dsdoctor.checkpoint.flat_weights import NotMerged
from dsdoctor.checkpoint.judge import GIB, Judged
from dsdoctor.checkpoint.merge import (
    LARGEST_FILE,
    Output,
    foreign_files,
    is_written,
    outputs_of,
    write_index,
    write_output,
)
from dsdoctor.checkpoint.sources import sources_of
from dsdoctor.checkpoint.values import Damaged
from dsdoctor.commands.checkpoint import CheckpointOrder, judge_checkpoint
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.files import check_folder, make_folder
from dsdoctor.core.finding import has_error
from dsdoctor.core.host import LocalHost

OF_A_RUN = {"checkpoint-cannot-load", "checkpoint-needs-universal", "checkpoint-load-not-known"}
"""Rules that speak of a run which would load the tag."""
STALE = 60.0
"""Seconds without a byte, after which a hidden file is taken for one that a killed merge left."""


class Watching(Protocol):
    """Who is told how far a merge is."""

    def total(self, count: int) -> None:
        """So many bytes are to be read."""

    def read(self, count: int) -> None:
        """So many were read."""


@dataclass(frozen=True, kw_only=True)
class MergeOrder:
    """``out``: the folder of the merged model. ``dtype``: "fp32" or "bf16". ``largest``: bytes of a file of it."""

    out: Path
    dtype: str = "fp32"
    largest: int = LARGEST_FILE


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was done: the files of the model, those that were there already, and its tensors and bytes."""

    out: str
    files: tuple[str, ...]
    kept: tuple[str, ...]
    tensors: int
    size: int


def merge_checkpoint(order: CheckpointOrder, merge: MergeOrder, watching: Watching) -> tuple[Judged, Merged | None]:
    """Write the weights of a tag as one model. None where the tag is not whole, which its findings tell.

    Raises UsageError for a folder that holds other weights, ImpossiblePlan where the disk is too small or the layout is not merged.
    """
    judged = whole_tag(judge_checkpoint(order)[0])
    if judged.examined is None or judged.outcome is None:
        return judged, None
    if any(file.unknown for file in judged.examined.tag.files):
        raise ImpossiblePlan("not all files of the tag could be read", hint="dsdoctor checkpoint DIR names them")
    outputs = _outputs(judged, merge)
    check_folder(merge.out, "--merge")
    make_folder(merge.out)
    _clear(merge.out)
    if foreign := foreign_files(merge.out, outputs):
        raise UsageError(f"{merge.out} holds other weights: {foreign[0]}", hint="name an empty folder: --merge OUT")
    kept = tuple(output.name for output in outputs if is_written(merge.out, output))
    todo = [output for output in outputs if output.name not in kept]
    _check_space(merge.out, sum(output.size for output in todo))
    watching.total(sum(output.size for output in todo))
    for output in todo:
        _write(merge.out, output, watching)
    write_index(merge.out, outputs)
    return judged, Merged(
        out=str(merge.out),
        files=tuple(output.name for output in outputs),
        kept=kept,
        tensors=sum(len(output.sources) for output in outputs),
        size=sum(output.size for output in outputs),
    )


def _outputs(judged: Judged, merge: MergeOrder) -> tuple[Output, ...]:
    assert judged.examined is not None
    try:
        sources = sources_of(judged.examined, {"fp32": "F32", "bf16": "BF16"}[merge.dtype])
    except NotMerged as error:
        raise ImpossiblePlan(f"{judged.examined.tag.folder.name} is not merged: {error}") from error
    return outputs_of(sources, largest=merge.largest)


def _write(folder: Path, output: Output, watching: Watching) -> None:
    try:
        write_output(folder, output, watching.read)
    except Damaged as error:
        raise DoctorError(
            f"{output.name} was not written: {error}", hint="dsdoctor checkpoint DIR --deep names the file"
        ) from error


def _check_space(folder: Path, needed: int) -> None:
    free = LocalHost().free(str(folder.absolute()))
    if free is not None and free < needed:
        message = f"the merged model takes {needed / GIB:.2f} GiB more, and {folder} has {free / GIB:.2f} GiB left"
        raise ImpossiblePlan(message, hint="name a folder on another disk: --merge OUT")


def _clear(folder: Path) -> None:
    """Take away what a merge left that was killed: hidden files of ours that nobody writes to any more."""
    for path in folder.glob(".dsdoctor-*.tmp"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if state.st_uid == os.geteuid() and time.time() - state.st_mtime > STALE:
                path.unlink()


def whole_tag(judged: Judged) -> Judged:
    """The same without what was said of a run, which is nothing to weights; ``outcome`` is None where anything else is an error."""
    about = tuple(finding for finding in judged.findings if finding.rule not in OF_A_RUN)
    return replace(judged, findings=about, outcome=None if has_error(about) else judged.outcome)
