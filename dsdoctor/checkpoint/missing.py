"""A tag whose files speak of others that are not there -> which, and what stands in the folder under a name like theirs."""

from collections.abc import Iterator

from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.expected import missing_files, missing_states
from dsdoctor.checkpoint.look import names_in
from dsdoctor.checkpoint.names import Part, parse_name
from dsdoctor.core.finding import Finding, Step, instead, step

MOST = 12
"""Files that a finding names."""
UNFINISHED = {".part", ".partial", ".tmp", ".crdownload", ".aria2", ".incomplete"}
"""What programs add to the name of a file that they have not finished."""


def missing(examined: Examined) -> Iterator[Finding]:
    """Files that the others speak of and that are not there."""
    gone = (*missing_files(examined), *missing_states(examined))
    if gone:
        yield Finding.error(
            "checkpoint-shard-missing",
            f"{len(gone)} file{'s' * (len(gone) > 1)} of {examined.tag.folder.name} {'are' if len(gone) > 1 else 'is'} missing",
            evidence=[
                *gone[:MOST],
                *([f"and {len(gone) - MOST} more"] if len(gone) > MOST else []),
                *_beside(examined, gone)[:4],
            ],
            fix="take an older tag, or copy the files from the node that wrote them",
            steps=(*listed(examined), *_without_optimizer(examined, gone)),
        )


def _without_optimizer(examined: Examined, gone: tuple[str, ...]) -> tuple[Step, ...]:
    """The way that is left where files of the optimizer alone are missing: below stage 3 the weights stand in another file."""
    names = [parse_name(name) for name in gone]
    only = all(name is not None and name.part == Part.OPTIMIZER.name for name in names)
    if not only or examined.facts.universal or (examined.facts.stage or PARTITIONED) >= PARTITIONED:
        return ()
    folder = examined.tag.folder
    return (
        instead(
            "python -m dsdoctor checkpoint {folder} --tag {tag} --load no-optimizer",
            note="whether its weights alone load",
            folder=str(examined.folder.path),
            tag=folder.name,
        ),
    )


def _beside(examined: Examined, gone: tuple[str, ...]) -> list[str]:
    """Files that stand in the folder under a name like that of a missing one, each as a line."""
    names = set(names_in(examined.tag.folder.path)) - set(examined.tag.folder.files)
    return [f"there is {name}, {how}" for name in sorted(names) for wanted in gone if (how := _likeness(name, wanted))]


def _likeness(name: str, wanted: str) -> str:
    """How a name came about where another one is wanted, "" for none that is like it.

    >>> _likeness("mp_rank_00_model_states (1).pt", "mp_rank_00_model_states.pt")
    "another name of it, as a copy by hand or a cloud's folder leaves it"
    >>> _likeness("mp_rank_00_model_states.pt.sha256", "mp_rank_00_model_states.pt")
    'a name that begins like it'
    """
    if name.startswith(".") and name[1:].rpartition(".")[0] == wanted:
        # .NAME.XXXXXX: rsync keeps it so while it copies
        return "as a copy that was cut off leaves it"
    if name != wanted and name.casefold() == wanted.casefold():
        return "whose letters are large where small ones are wanted, or the other way round"
    if name.startswith(f"{wanted}."):
        unfinished = name[len(wanted) :].casefold() in UNFINISHED
        return "as a save or a download that was cut off leaves it" if unfinished else "a name that begins like it"
    stem = wanted.removesuffix(".pt")
    if name.startswith((f"{stem} ", f"{stem}(", f"{stem}-", f"Copy of {stem}")):
        return "another name of it, as a copy by hand or a cloud's folder leaves it"
    return ""


def listed(examined: Examined) -> tuple[Step, ...]:
    """The command that shows what is there."""
    return (step("ls -l {folder}", folder=str(examined.tag.folder.path)),)
