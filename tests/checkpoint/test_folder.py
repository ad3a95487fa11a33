"""The quick look: healthy checkpoints of every kind are let alone, and each fault is named with its file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.checkpoint.judge import Judged, judge
from dsdoctor.checkpoint.look import look
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.plan import Plan, Verdict
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
