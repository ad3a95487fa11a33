"""The quick look: healthy checkpoints of every kind are let alone, and each fault is named with its file."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.checkpoint.folder import Part, look
from dsdoctor.checkpoint.judge import CheckpointOrder, Judged, judge, judge_checkpoint, repair_checkpoint
from dsdoctor.checkpoint.loading import Plan, Verdict
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, has_error
from tests.checkpoint.written import KINDS, Kind, write

QUICK = (KINDS[6],)


def judged(folder: Path, tag: str | None = None) -> Judged:
    return judge(look(folder), tag, Plan())


def rules(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.rule for finding in findings}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_healthy_checkpoint_loads_and_nothing_is_said_against_it(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind)

    found = judged(tmp_path)

    assert found.findings == ()
    assert found.outcome is not None
    assert found.outcome.verdict is Verdict.LOADS
    assert found.examined is not None
    facts = found.examined.facts
    assert (facts.stage, facts.dtype, facts.world, facts.step) == (kind.stage, kind.dtype, kind.world, kind.step)


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "elsewhere.pt")


def cut(part: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: max(1, min(len(content) - 1, int(len(content) * part)))])

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": gone,
    "empty": empty,
    "zeros": zeros,
    "link to nothing": link_to_nothing,
    "link to itself": link_to_itself,
    **{f"cut at {part}": cut(part) for part in (0.0, 0.6, 1.0)},
}


def sick(
    tmp_path: Path, kinds: tuple[Kind, ...], damages: dict[str, Callable[[Path], None]]
) -> Iterator[tuple[str, Path, str]]:
    """Each file of each kind with each damage: (what it is, the folder, the file)."""
    for kind in kinds:
        tag = write(tmp_path / kind.name, kind)
        for file in sorted(tag.iterdir()):
            for name, damage in damages.items():
                content = file.read_bytes()
                damage(file)
                yield f"{kind.name}: {file.name} {name}", tmp_path / kind.name, file.name
                file.unlink(missing_ok=True)
                file.write_bytes(content)


def unnamed(tmp_path: Path, kinds: tuple[Kind, ...], damages: dict[str, Callable[[Path], None]]) -> list[str]:
    """Sick checkpoints whose file is not named by an ERROR, or that are said to load."""
    wrong = []
    for what, folder, file in sick(tmp_path, kinds, damages):
        found = judged(folder) if look(folder).tags else None
        named = found is not None and any(
            file in line for each in found.findings if has_error((each,)) for line in each.evidence
        )
        only_file = found is None or found.examined is None
        if not (named or only_file) or (found is not None and found.outcome is not None):
            wrong.append(what)
    return wrong


def test_each_damage_of_each_file_is_named_with_the_file(tmp_path: Path) -> None:
    assert unnamed(tmp_path, QUICK, DAMAGES) == []


@pytest.mark.slow
def test_each_file_of_each_kind_cut_off_at_many_places_is_named(tmp_path: Path) -> None:
    places = {f"cut at {part / 30}": cut(part / 30) for part in range(31)}

    assert unnamed(tmp_path, KINDS, {**DAMAGES, **places}) == []


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[6]], ids=lambda kind: kind.name)
def test_files_that_were_exchanged_or_are_of_another_step_are_told(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path / "a", kind)
    other = write(tmp_path / "b", Kind(stage=kind.stage, dtype=kind.dtype, step=7))
    tag = tmp_path / "a" / "global_step2"
    first, second = sorted(tag.glob("*optim_states.pt"))
    contents = first.read_bytes(), second.read_bytes()

    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    exchanged = judged(tmp_path / "a")
    first.write_bytes(contents[0])
    second.write_bytes((other / second.name).read_bytes())
    mixed = judged(tmp_path / "a")

    assert rules(exchanged.findings) == {"checkpoint-shards-mixed"}
    assert first.name in exchanged.findings[0].evidence[0]
    assert rules(mixed.findings) == {"checkpoint-shards-mixed"}
    assert any(second.name in line for line in mixed.findings[0].evidence)
    assert mixed.outcome is None


def test_latest_that_is_gone_wrong_or_behind_is_told(tmp_path: Path) -> None:
    write(tmp_path, Kind(step=2))
    write(tmp_path, Kind(step=10))

    (tmp_path / "latest").unlink()
    missing = judged(tmp_path)
    named = judged(tmp_path, "global_step2")
    (tmp_path / "latest").write_text("global_step3\n")
    wrong = judged(tmp_path)
    (tmp_path / "latest").write_text("global_step2")
    behind = judged(tmp_path)
    next((tmp_path / "global_step10").glob("*optim*")).unlink()
    incomplete = judged(tmp_path)

    assert rules(missing.findings) == {"checkpoint-latest-missing"}
    assert rules(named.findings) == set()
    assert rules(wrong.findings) == {"checkpoint-latest-wrong"}
    assert rules(behind.findings) == {"checkpoint-newer-tag"}
    assert not has_error(behind.findings)
    assert rules(incomplete.findings) == {"checkpoint-newest-incomplete"}
    assert not has_error(incomplete.findings)


def test_a_newer_tag_of_another_training_is_told_as_such(tmp_path: Path) -> None:
    write(tmp_path, Kind(step=1))
    write(tmp_path, Kind(step=2), latest=False)
    same = judged(tmp_path)
    write(tmp_path, Kind(stage=3, step=3), latest=False)
    two = judged(tmp_path)

    assert [each.evidence for each in same.findings] == [()]
    assert two.findings[1].evidence == (
        "they may come from two runs: it was saved at stage 3, and the other one at stage 2",
    )


def test_a_folder_without_a_tag_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")

    found = judged(tmp_path)

    assert rules(found.findings) == {"checkpoint-no-tags"}
    assert "weights only: model.safetensors" in found.findings[0].evidence


def test_what_is_no_file_of_torch_or_an_old_one_is_not_called_damaged_without_cause(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind())
    file = next(tag.glob("*model_states.pt"))
    file.write_bytes(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.")

    found = judged(tmp_path)

    assert rules(found.findings) == {"checkpoint-not-read", "checkpoint-load-not-known"}
    assert not has_error(found.findings)


def test_ranks_whose_pickles_are_the_same_share_what_was_read(tmp_path: Path) -> None:
    write(tmp_path, Kind(stage=3, world=4))

    found = judged(tmp_path)

    assert found.examined is not None
    contents = [shard.file.content for shard in found.examined.tag.of(Part.MODEL)]
    assert len(contents) == 4
    assert all(content is contents[0] for content in contents)
    assert found.findings == ()


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
STAND_INS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n": "git lfs pull",
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code></Error>": "XML or HTML",
    b"<!DOCTYPE html><html></html>": "XML or HTML",
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03": "gzip",
    b"\x28\xb5\x2f\xfd\x04\x00": "zstd",
    b"somebody's notes": "not written by torch.save",
}


@pytest.mark.parametrize("content", STAND_INS, ids=STAND_INS.values())
def test_what_stands_for_a_file_is_said(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path, Kind()) / OPTIMIZER).write_bytes(content)

    (finding,) = judged(tmp_path).findings

    assert finding.rule == "checkpoint-file-damaged"
    assert STAND_INS[content] in finding.evidence[0]


@pytest.mark.parametrize(
    "name", [f".{OPTIMIZER}.x7Q2aB", OPTIMIZER.upper(), f"{OPTIMIZER}.tmp", OPTIMIZER.replace(".pt", " (1).pt")]
)
def test_a_file_that_stands_under_another_name_is_shown_beside_the_missing_one(tmp_path: Path, name: str) -> None:
    tag = write(tmp_path, Kind())
    (tag / OPTIMIZER).rename(tag / name)

    (finding,) = judged(tmp_path).findings

    assert finding.rule == "checkpoint-shard-missing"
    assert finding.evidence[0] == OPTIMIZER
    assert finding.evidence[1].startswith(f"there is {name}, ")


CUT = [".part", ".partial", ".tmp", ".crdownload", ".aria2", ".incomplete"]
OTHER = [".sha256", ".md5", ".gz", ".bak", ".tmp.json"]


def test_only_what_programs_call_unfinished_files_is_said_to_be_cut_off(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind())
    (tag / OPTIMIZER).unlink()
    said = {}
    for more in (*CUT, *OTHER):
        (tag / f"{OPTIMIZER}{more}").touch()
        said[more] = judged(tmp_path).findings[0].evidence[1].partition(", ")[2]
        (tag / f"{OPTIMIZER}{more}").unlink()

    assert said == {
        **dict.fromkeys(CUT, "as an interrupted save or download leaves it"),
        **dict.fromkeys(OTHER, "a name that starts the same"),
    }


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind())
    (tag / OPTIMIZER).unlink()
    (tag / OPTIMIZER).mkdir()
    file = judged(tmp_path)
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", Kind(), latest=False)
    (tmp_path / "b/latest").mkdir()
    latest = judged(tmp_path / "b")

    assert rules(file.findings) == {"checkpoint-file-damaged"}
    assert rules(latest.findings) == {"checkpoint-latest-missing"}


def test_a_latest_whose_folder_is_there_says_what_is_in_it(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(step=2))
    write(tmp_path, Kind(step=1), latest=False)
    tag.rename(tmp_path / "moved")
    tag.mkdir()
    (tmp_path / "moved").rename(tag / tag.name)

    nested = judged(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xef\xbb\xbfglobal_step1")
    marked = judged(tmp_path)

    assert rules(nested.findings) == rules(marked.findings) == {"checkpoint-latest-wrong"}
    assert f"{tag / tag.name} does" in nested.findings[0].evidence
    assert any("byte order mark" in line for line in marked.findings[0].evidence)


def test_model_states_of_another_stage_in_the_same_tag_are_left_over(tmp_path: Path) -> None:
    tag = write(tmp_path / "a", Kind(stage=2))
    for file in write(tmp_path / "b", Kind(stage=3)).glob("*model_states.pt"):
        file.rename(tag / file.name)

    found = judged(tmp_path / "a")

    assert rules(found.findings) == {"checkpoint-leftover-shards"}
    assert found.findings[0].title.endswith("with a stage that the last save did not have")
    assert len(found.findings[0].evidence) == 2
    assert found.outcome is not None
    assert found.outcome.verdict is Verdict.LOADS


def as_an_ordinary_user(look_at: Callable[[], str]) -> str:
    """What a function says in a process that is not root's."""
    read, write_to = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(write_to, look_at().encode())
        os._exit(0)
    os.close(write_to)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def test_files_and_folders_that_this_user_may_not_read_are_told() -> None:
    def said() -> str:
        try:
            found = judged(Path(place))
        except UsageError as error:
            return str(error)
        return " ".join(each.rule for each in found.findings)

    with tempfile.TemporaryDirectory() as place:
        tag = write(Path(place), Kind())
        for path in (Path(place), tag, *tag.iterdir()):
            path.chmod(0o755)
        judged(Path(place))  # what this imports, that user may not
        before = as_an_ordinary_user(said)
        (tag / OPTIMIZER).chmod(0)
        file = as_an_ordinary_user(said)
        tag.chmod(0)
        folder = as_an_ordinary_user(said)
        tag.chmod(0o755)

    assert before == ""
    assert file == "checkpoint-not-yours checkpoint-load-not-known"
    assert folder == f"you may not read the folder {tag}"


@pytest.mark.slow
def test_what_another_user_keeps_to_himself_stops_only_one_who_wants_it() -> None:
    def said(tag: str | None = None) -> str:
        try:
            return " ".join(each.rule for each in judged(Path(place), tag).findings)
        except UsageError as error:
            return str(error)

    def whole(folder: Path) -> str:
        try:
            return str(judge_checkpoint(CheckpointOrder(folder=folder)))
        except UsageError as error:
            return str(error)

    def mended() -> str:
        try:
            return str(repair_checkpoint(CheckpointOrder(folder=Path(place))))
        except UsageError as error:
            return str(error)

    with tempfile.TemporaryDirectory() as place:
        older, newer = (write(Path(place), Kind(step=step)) for step in (1, 2))
        lost = Path(place) / "run1/lost+found"
        lost.mkdir(parents=True)
        for path in (Path(place), lost.parent, *(each for tag in (older, newer) for each in (tag, *tag.iterdir()))):
            path.chmod(0o755)
        judged(Path(place))  # what this imports, that user may not
        told = {}
        for closed in (lost, newer):
            closed.chmod(0)
        for latest in ("global_step2", "run1", "run1/lost+found/x", "global_step1"):
            (Path(place) / "latest").write_text(latest)
            told[latest] = [as_an_ordinary_user(look_at) for look_at in (said, lambda: said("global_step1"), mended)]
        inner = [as_an_ordinary_user(lambda folder=folder: whole(folder)) for folder in (lost, lost / "x", newer)]
        newer.chmod(0o755)
        lost.chmod(0o755)

    denied = "you may not read the folder "
    nothing = f"nothing was repaired: you may not read {newer}, which may be a newer complete tag"
    assert inner == [f"{denied}{folder}" for folder in (lost, lost / "x", newer)]
    assert told == {
        "global_step2": [f"{denied}{newer}", "", f"{denied}{newer}"],
        "run1": ["checkpoint-latest-wrong checkpoint-newer-tag", "", nothing],
        "run1/lost+found/x": [f"{denied}{lost}/x", "", f"{denied}{lost}/x"],
        "global_step1": ["checkpoint-newer-tag", "", nothing],
    }


@pytest.mark.parametrize("name", ["a" * 300, "ü" * 140, "a/" * 2000, "a\0b"])
def test_a_latest_that_no_system_takes_for_a_name_is_wrong(tmp_path: Path, name: str) -> None:
    write(tmp_path, Kind())
    (tmp_path / "latest").write_text(name)

    assert rules(judged(tmp_path).findings) == {"checkpoint-latest-wrong"}
    with pytest.raises(UsageError, match="has no tag"):
        judged(tmp_path, name)
