"""Which tag DeepSpeed would load, and what the other tags of the folder tell: latest gone, wrong or behind."""

from collections.abc import Iterator

from dsdoctor.checkpoint.look import Folder, TagFolder, is_folder, is_tag, named_tag, names_in, step_of
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.text import and_more


def choose(folder: Folder, wanted: str | None) -> TagFolder | None:
    """The tag that is judged: the one that is named, that ``latest`` names, or the newest.

    Raises UsageError for an unknown one, and for one that this user may not read.
    """
    if wanted is not None:
        found = folder.tag(wanted) or named_tag(folder.path, wanted)
        if found is None:
            names = and_more(tuple(tag.name for tag in folder.tags), 6) or "none"
            raise UsageError(f"{folder.path} has no tag {wanted!r}", hint=f"it has {names}")
        return found
    if folder.latest and (named := folder.tag(folder.latest) or named_tag(folder.path, folder.latest)):
        return named
    plain = [tag for tag in folder.tags if not tag.universal]
    return (plain or [*folder.tags] or [None])[-1]  # type: ignore[list-item]


def judge_latest(folder: Folder, *, chosen: bool) -> Iterator[Finding]:
    """What becomes of load_checkpoint(DIR) without a tag."""
    names = and_more(tuple(tag.name for tag in folder.tags), 6)
    if chosen or not folder.tags:
        return
    if folder.latest is None:
        if all(tag.universal for tag in folder.tags):
            return
        yield Finding.error(
            "checkpoint-latest-missing",
            f"{folder.path} has no file latest: load_checkpoint returns (None, None), and the training begins anew",
            evidence=(f"tags: {names}",),
            fix="write it from the newest complete tag, or name the tag: load_checkpoint(DIR, tag=...)",
            steps=(step("python -m dsdoctor checkpoint {folder} --repair", folder=str(folder.path)),),
        )
    elif folder.tag(folder.latest) is None:
        yield Finding.error(
            "checkpoint-latest-wrong",
            f"latest in {folder.path} is empty"
            if not folder.latest
            else f"latest in {folder.path} names {folder.latest!r}, and there is no such tag",
            evidence=(f"tags: {names}", *_instead(folder)),
            fix="write it from the newest complete tag, or name the tag: load_checkpoint(DIR, tag=...)",
            steps=(step("python -m dsdoctor checkpoint {folder} --repair", folder=str(folder.path)),),
        )
    elif folder.latest.startswith("/"):
        yield Finding.warning(
            "checkpoint-latest-absolute",
            f"latest in {folder.path} holds a whole path: it is found as long as the folder is not moved or copied",
            evidence=(folder.latest,),
            fix="let it name the tag alone, as save_checkpoint writes it",
        )


def _instead(folder: Folder) -> Iterator[str]:
    """What is there under the name that latest says, or why nothing can be."""
    latest = folder.latest or ""
    if latest.startswith(("\ufeff", "\\xff\\xfe", "\\xfe\\xff")):
        yield "latest begins with a byte order mark, as editors and shells of Windows write it"
    elif latest and is_folder(place := folder.path / latest):
        yield f"{place} is there, and holds no file under a name that DeepSpeed looks for"
        yield from (f"{place / name} does" for name in names_in(place) if is_tag(place / name))


def newer_tags(folder: Folder, judged: TagFolder | None) -> tuple[TagFolder, ...]:
    """Tags of a later step than the one that is judged, by the numbers in their names."""
    if judged is None or judged.step is None:
        return ()
    later = [tag for tag in folder.tags if not tag.universal and tag.step is not None and tag.step > judged.step]
    return tuple(sorted(later, key=lambda tag: tag.step or 0))


def judge_denied(folder: Folder, judged: TagFolder) -> Iterator[Finding]:
    """Folders under the name of a later tag that this user may not read."""
    for name in folder.denied:
        if judged.step is not None and (step_of(name) or 0) > judged.step:
            yield Finding.note(
                "checkpoint-newer-tag",
                f"{name} is newer than {judged.name} by its name, and you may not read it: nothing else is known of it",
                fix="look at it as the user whose it is, which ls -ld shows",
            )


def judge_newer(newer: TagFolder, broken: tuple[Finding, ...], judged: TagFolder, differs: str = "") -> Finding:
    """A later tag than the one that latest names: one that is not whole, or one that was not made the latest.

    ``differs``: how it shows that it is of another training.
    """
    if broken:
        return Finding.warning(
            "checkpoint-newest-incomplete",
            f"{newer.name} is newer than {judged.name} and is not complete",
            evidence=[finding.title for finding in broken],
            fix="nothing is lost by it: load_checkpoint takes the tag that latest names",
            steps=(
                step(
                    "python -m dsdoctor checkpoint {folder} --repair",
                    note="sets it aside",
                    folder=str(newer.path.parent),
                ),
            ),
        )
    return Finding.note(
        "checkpoint-newer-tag",
        f"{newer.name} is newer than {judged.name}, which is the one that would be loaded",
        evidence=[f"they may be of two trainings: {differs}"] if differs else [],
        fix="name the tag to load it: load_checkpoint(DIR, tag=...)",
    )
