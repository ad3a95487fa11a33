"""--repair: latest from the newest complete tag, an incomplete newer one renamed; nothing deleted, nothing while it is saved."""

import os
import time
from pathlib import Path

import pytest

from dsdoctor.checkpoint.judge import CheckpointOrder, repair_checkpoint
from dsdoctor.core.errors import UsageError
from tests.checkpoint.written import Kind, write


def made(folder: Path, *, broken: tuple[int, ...] = (), steps: tuple[int, ...] = (2, 4, 6)) -> Path:
    """Tags an hour old; those that are broken lack a file."""
    for step in steps:
        tag = write(folder, Kind(step=step))
        if step in broken:
            next(tag.glob("*optim*")).unlink()
        for file in tag.iterdir():
            os.utime(file, (time.time() - 3600 + step,) * 2)
    return folder


def files(folder: Path) -> set[str]:
    return {f"{path.parent.name.removesuffix('.incomplete')}/{path.name}" for path in folder.rglob("*.pt")}


@pytest.mark.parametrize("latest", [None, "global_step9", "global_step6"])
def test_latest_comes_from_the_newest_complete_tag_and_a_newer_one_is_set_aside(
    tmp_path: Path, latest: str | None
) -> None:
    made(tmp_path, broken=(6,))
    (tmp_path / "latest").unlink()
    if latest:
        (tmp_path / "latest").write_text(latest)
    before = files(tmp_path)

    repaired = repair_checkpoint(CheckpointOrder(folder=tmp_path))

    assert (repaired.latest, repaired.aside) == ("global_step4", ("global_step6 -> global_step6.incomplete",))
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert files(tmp_path) == before
    again = repair_checkpoint(CheckpointOrder(folder=tmp_path))
    assert (again.latest, again.aside) == (None, ())


def test_a_latest_that_names_an_older_complete_tag_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "latest").write_text("global_step2")

    assert repair_checkpoint(CheckpointOrder(folder=tmp_path)).latest is None
    assert (tmp_path / "latest").read_text() == "global_step2"


def test_nothing_is_done_while_a_tag_may_still_be_written_or_where_none_is_complete(tmp_path: Path) -> None:
    made(tmp_path / "fresh", broken=(6,))
    os.utime(next((tmp_path / "fresh/global_step6").iterdir()))
    made(tmp_path / "none", broken=(2,), steps=(2,))

    for name, why in (("fresh", "may still be incomplete"), ("none", "no tag is complete")):
        before = set(tmp_path.rglob("*"))
        with pytest.raises(UsageError, match=why):
            repair_checkpoint(CheckpointOrder(folder=tmp_path / name))
        assert set(tmp_path.rglob("*")) == before
