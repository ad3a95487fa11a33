"""A folder -> its tags, what ``latest`` says, and one tag with the directory and the pickle of each file. Judges nothing.

The names that DeepSpeed gives to the files of a tag say what each file holds. Which tag DeepSpeed would load is known from
``latest``, and from what the other tags tell. What can be put right for certain (``latest``, a newest tag that is not complete) is
decided here; nothing is changed.
"""

import enum
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.checkpoint.torch_file import Archive, Pickles, read_archive
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

PATTERN = re.compile(
    r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{2,7})_?(?P<what>optim|model)_?states\.pt"
    r"|mp_rank_(?P<only>\d{2,7})_model_states\.pt"
    r"|layer_(?P<moe>\d{1,7})_expert_(?P<expert>\d{1,7})_mp_rank_(?P<moe_mp>\d{2,7})_model_states\.pt"
    r"|expp_rank_(?P<expp>\d{1,7})_mp_rank_(?P<expp_mp>\d{2,7})_optim_states\.pt"
    r"|layer_(?P<layer>\d{2,7})-(?:model_(?P<model>\d{2,7})-)?model_states\.pt",
    re.ASCII,
)
MAX_TAG_BYTES = 4096
UNIVERSAL = "zero"
"""The folder of a universal tag that has one folder for each parameter."""
GROUPS = "optimizer_state.pt"
"""The file in it that has the optimizer's groups: base_optimizer.py and stage3.py open it before any parameter."""
ASIDE = ".incomplete"
QUIET_SECONDS = 600.0
"""A tag of which a file was written later may still be incomplete."""


class Part(enum.Enum):
    """What a file holds."""

    MODEL = "model states"
    OPTIMIZER = "optimizer states"
    EXPERT = "an expert's weights"
    EXPERT_OPTIMIZER = "an expert rank's optimizer states"
    LAYER = "a pipeline layer's weights"


@dataclass(frozen=True, kw_only=True, order=True)
class ShardName:
    """``data``: the data-parallel rank, ``model``: the model-parallel one (tensor and pipeline together). None: has none.

    ``layer`` and ``expert`` number what an expert's or a pipeline's file holds; ``bf16`` is the mark of a bf16 optimizer.
    """

    part: str
    data: int | None = None
    model: int | None = None
    layer: int | None = None
    expert: int | None = None
    bf16: bool = False


def parse_name(name: str) -> ShardName | None:
    """What a file of this name holds; None for one that is none of a checkpoint.

    >>> parse_name("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt")
    ShardName(part='OPTIMIZER', data=3, model=0, layer=None, expert=None, bf16=True)
    >>> parse_name("layer_02-model_states.pt")
    ShardName(part='LAYER', data=None, model=None, layer=2, expert=None, bf16=False)
    >>> parse_name("training_args.bin") is None
    True
    """
    found = PATTERN.fullmatch(name)
    if not found:
        return None
    number = {key: int(text) for key, text in found.groupdict().items() if text and text.isdigit()}
    if found["what"]:
        part = Part.OPTIMIZER if found["what"] == "optim" else Part.MODEL
        return ShardName(part=part.name, data=number["dp"], model=number["mp"], bf16=bool(found["bf16"]))
    if found["only"]:
        return ShardName(part=Part.MODEL.name, model=number["only"])
    if found["moe"]:
        return ShardName(part=Part.EXPERT.name, layer=number["moe"], expert=number["expert"], model=number["moe_mp"])
    if found["expp"]:
        return ShardName(part=Part.EXPERT_OPTIMIZER.name, expert=number["expp"], model=number["expp_mp"])
    return ShardName(part=Part.LAYER.name, layer=number["layer"], model=number.get("model"))


def optimizer_name(data: int, model: int, *, bf16: bool) -> str:
    """The file of a rank's optimizer states.

    >>> optimizer_name(3, 0, bf16=True)
    'bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt'
    """
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"


def model_name(data: int | None, model: int) -> str:
    """The file of the model states; at stage 3 each data-parallel rank has one.

    >>> model_name(None, 1), model_name(2, 0)
    ('mp_rank_01_model_states.pt', 'zero_pp_rank_2_mp_rank_00_model_states.pt')
    """
    rank = "" if data is None else f"zero_pp_rank_{data}_"
    return f"{rank}mp_rank_{model:02d}_model_states.pt"


def expert_name(layer: int, expert: int, model: int) -> str:
    """The file of an expert's weights."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{model:02d}_model_states.pt"


def layer_name(layer: int, model: int | None) -> str:
    """The file of a pipeline layer's weights."""
    return f"layer_{layer:02d}-{'' if model is None else f'model_{model:02d}-'}model_states.pt"


def step_of(name: str) -> int | None:
    """The step in a tag's name, as DeepSpeed gives it."""
    found = re.fullmatch(r"global_step(\d{1,12})(?:_universal)?", name, re.ASCII)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of a tag, and what its name says."""

    name: ShardName
    file: Archive

    @property
    def part(self) -> Part:
        """What it holds."""
        return Part[self.name.part]


@dataclass(frozen=True, kw_only=True)
class TagFolder:
    """A tag as its folder shows it, no file opened. ``modified``: when its newest file was written."""

    name: str
    path: Path
    files: tuple[str, ...]
    size: int
    modified: float
    universal: bool

    @property
    def step(self) -> int | None:
        """The step in its name, as DeepSpeed gives it."""
        return step_of(self.name)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a universal tag: its folder's name and the files in it."""

    name: str
    files: tuple[Archive, ...]


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A tag with every file of it read. ``parameters``: those of a universal tag, None for a tag that is none. ``groups``: the
    file of its optimizer's groups, None where that is not there."""

    folder: TagFolder
    shards: tuple[Shard, ...]
    parameters: tuple[Parameter, ...] | None = None
    groups: Archive | None = None

    def of(self, part: Part) -> tuple[Shard, ...]:
        """The files that hold one kind of thing, in order."""
        return tuple(shard for shard in self.shards if shard.part is part)

    @property
    def files(self) -> tuple[Archive, ...]:
        """All files, those of the parameters too."""
        inner = (file for parameter in self.parameters or () for file in parameter.files)
        return (*(shard.file for shard in self.shards), *((self.groups,) if self.groups else ()), *inner)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of tags. ``latest`` and ``latest_universal``: what the files of that name say, None where they are not there.

    ``beside``: files of Hugging Face that hold the weights too. ``denied``: folders in it that this user may not read.
    """

    path: Path
    tags: tuple[TagFolder, ...]
    latest: str | None = None
    latest_universal: str | None = None
    beside: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def tag(self, name: str) -> TagFolder | None:
        """The tag of a name."""
        return next((tag for tag in self.tags if tag.name == name), None)


def look(path: Path) -> Folder:
    """Look at a folder, or at the folder around a tag that is named. Raises UsageError for what is none."""
    _readable(path)
    if not is_folder(path):
        around = path.parent if path.exists() else "DIR"
        raise UsageError(
            f"{path} is {'no folder' if path.exists() else 'not there'}", hint=f"dsdoctor checkpoint {around}"
        )
    latest = _first_line(path / "latest")
    found, denied = _tags(path)
    tags = tuple(sorted(found, key=lambda tag: (tag.modified, tag.name)))
    if latest and latest not in {tag.name for tag in tags} and (named := _named_and_readable(path, latest)):
        tags = (*tags, named)
    return Folder(
        path=path,
        tags=tags,
        latest=latest,
        latest_universal=_first_line(path / "latest_universal"),
        beside=tuple(
            sorted(name for name in names_in(path) if re.fullmatch(r"(model|pytorch_model).*\.(safetensors|bin)", name))
        ),
        denied=denied,
    )


def checkpoint_near(folder: Path) -> str:
    """Where a folder from which load_checkpoint loaded nothing has a checkpoint all the same, in words: it is one of its tags, or
    has it within. "" for none: it is the first start of a script that resumes where there is something."""
    try:
        if not is_folder(folder):
            return ""
        if any(map(parse_name, names_in(folder))):
            return f"it is a tag itself; pass its parent to load_checkpoint: {folder.absolute().parent}"
        if look(folder).tags:
            return "the folder has no file latest"
        below = (name for name in sorted(names_in(folder)) if is_folder(folder / name) and look(folder / name).tags)
        found = next(below, None)
    except (OSError, UsageError):
        return ""
    return f"its folder {found} holds a checkpoint" if found else ""


def named_tag(path: Path, name: str) -> TagFolder | None:
    """The tag that DeepSpeed finds by a name, which may lead further down ("run1/step5") or be a whole path.

    Raises UsageError for one that this user may not read.
    """
    folder = path / name
    try:
        _readable(folder)
        tag = tag_folder(folder) if is_folder(folder) else None
    except PermissionError as error:
        raise _not_yours(folder) from error
    return replace(tag, name=name) if tag else None


def _named_and_readable(path: Path, name: str) -> TagFolder | None:
    try:
        return named_tag(path, name)
    except UsageError:  # matters only to one who wants that tag: choose says it then
        return None


def _readable(folder: Path) -> None:
    """Raises UsageError for a folder that this user may not read."""
    if is_denied(folder):
        raise _not_yours(folder)


def _not_yours(folder: Path) -> UsageError:
    return UsageError(f"you may not read the folder {folder}", hint="ls -ld shows who owns it")


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen there; a name that no system takes is none."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_denied(folder: Path) -> bool:
    """Whether this user may not list a folder or not open what is in it, or may not even see whether it is there."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode) and not os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def folder_of_tags_below(path: Path) -> list[Path]:
    """Folders in a folder that hold tags themselves (checkpoint-500), the one that was written last at the end."""
    inner = [path / name for name in names_in(path) if is_folder(path / name) and not is_denied(path / name)]
    return sorted((each for each in inner if _tags(each)[0]), key=lambda each: each.stat().st_mtime)


def names_in(folder: Path) -> list[str]:
    """All names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def is_tag(path: Path) -> bool:
    """Whether a folder holds the files of a tag."""
    return is_folder(path) and not is_denied(path) and any(parse_name(name) for name in names_in(path))


def read_tag(folder: TagFolder) -> Tag:
    """Read the directory and the pickle of each file of a tag."""
    named = [(name, parse_name(name)) for name in folder.files]
    pickles: Pickles = {}
    shards = [Shard(name=parsed, file=read_archive(folder.path / name, pickles)) for name, parsed in named if parsed]
    parameters = tuple(_parameters(folder.path / UNIVERSAL, pickles)) if folder.universal else None
    groups = folder.path / UNIVERSAL / GROUPS
    is_there = folder.universal and (groups.is_symlink() or groups.exists())
    return Tag(
        folder=folder,
        shards=tuple(sorted(shards, key=lambda shard: _order(shard.name))),
        parameters=parameters,
        groups=read_archive(groups, pickles) if is_there else None,
    )


def _order(name: ShardName) -> tuple[str, int, int, int, int]:
    numbers = (name.layer, name.expert, name.model, name.data)
    first, second, third, fourth = (-1 if number is None else number for number in numbers)
    return (name.part, first, second, third, fourth)


def _tags(path: Path) -> tuple[list[TagFolder], tuple[str, ...]]:
    """The tags in a folder, and the names of the folders that this user may not read."""
    tags, denied = [], []
    for name in names_in(path):
        folder = path / name
        try:
            tag = tag_folder(folder) if is_folder(folder) and not is_denied(folder) else None
        except PermissionError:  # a server of files may refuse what the rights allow
            denied.append(name)
            continue
        except FileNotFoundError:  # a training takes its old tags away
            continue
        if tag:
            tags.append(tag)
        elif is_denied(folder):
            denied.append(name)
    return tags, tuple(denied)


def tag_folder(folder: Path) -> TagFolder | None:
    """A folder as a tag; None for one without a file of DeepSpeed's."""
    files = tuple(sorted(name for name in names_in(folder) if parse_name(name)))
    universal = is_folder(folder / UNIVERSAL)
    if not files and not universal:
        return None
    states = [state for name in files if (state := _state(folder / name))]
    return TagFolder(
        name=folder.name,
        path=folder,
        files=files,
        size=sum(state.st_size for state in states),
        modified=max((state.st_mtime for state in states), default=folder.stat().st_mtime),
        universal=universal,
    )


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _parameters(path: Path, pickles: Pickles) -> Iterator[Parameter]:
    _readable(path)
    for name in names_in(path):
        if is_folder(path / name):
            _readable(path / name)
            files = sorted(each for each in names_in(path / name) if each.endswith(".pt"))
            yield Parameter(name=name, files=tuple(read_archive(path / name / each, pickles) for each in files))


def _first_line(path: Path) -> str | None:
    """What DeepSpeed reads of such a file: all of it, stripped."""
    try:
        return read_limited(path, MAX_TAG_BYTES).decode("utf-8", "backslashreplace").strip()
    except (FileNotFoundError, IsADirectoryError):
        # DeepSpeed asks whether it is a file
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="ls -l shows who owns it") from error


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
        yield book.finding(
            "checkpoint-latest-missing", Severity.ERROR, evidence=(f"tags: {names}",), folder=str(folder.path)
        )
    elif folder.tag(folder.latest) is None:
        yield book.finding(
            "checkpoint-latest-wrong",
            Severity.ERROR,
            case="" if folder.latest else "empty",
            evidence=(f"tags: {names}", *_instead(folder)),
            latest=repr(folder.latest),
            folder=str(folder.path),
        )
    elif folder.latest.startswith("/"):
        yield book.finding(
            "checkpoint-latest-absolute", Severity.WARNING, evidence=(folder.latest,), folder=str(folder.path)
        )


def _instead(folder: Folder) -> Iterator[str]:
    """What is there under the name that latest says, or why nothing can be."""
    latest = folder.latest or ""
    if latest.startswith(("\ufeff", "\\xff\\xfe", "\\xfe\\xff")):
        yield "latest begins with a byte order mark, as editors and shells of Windows write it"
    elif latest and is_folder(place := folder.path / latest):
        yield f"{place} exists, but has no file with a name that DeepSpeed looks for"
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
            yield book.finding(
                "checkpoint-newer-tag",
                Severity.NOTE,
                case="denied",
                newer=name,
                tag=judged.name,
                newer_folder=str(folder.path / name),
            )


def judge_newer(newer: TagFolder, broken: tuple[Finding, ...], judged: TagFolder, differs: str = "") -> Finding:
    """A later tag than the one that latest names: one that is not whole, or one that was not made the latest.

    ``differs``: how it shows that it is of another training.
    """
    if broken:
        return book.finding(
            "checkpoint-newest-incomplete",
            Severity.WARNING,
            evidence=[finding.title for finding in broken],
            newer=newer.name,
            tag=judged.name,
            folder=str(newer.path.parent),
        )
    return book.finding(
        "checkpoint-newer-tag",
        Severity.NOTE,
        evidence=[f"they may come from two runs: {differs}"] if differs else [],
        newer=newer.name,
        tag=judged.name,
    )


@dataclass(frozen=True, kw_only=True)
class Repair:
    """``latest``: what the file is to say, None where it stays. ``aside``: tags that get another name. ``left``: why not more."""

    latest: str | None = None
    aside: tuple[str, ...] = ()
    left: str = ""


def repair_of(folder: Folder, complete: Mapping[str, bool], *, now: float) -> Repair:
    """What is to be done. ``complete``: for each tag that is not universal whether every file of it is there and whole."""
    tags = sorted((tag for tag in folder.tags if tag.name in complete and not _is_aside(tag)), key=_age)
    whole = [tag for tag in tags if complete[tag.name]]
    if not whole:
        return Repair(left="no tag is complete")
    newest = whole[-1]
    broken = [tag for tag in tags if not complete[tag.name] and _age(tag) > _age(newest)]
    fresh = [tag.name for tag in broken if now - tag.modified < QUIET_SECONDS]
    if fresh:
        return Repair(
            left=f"{fresh[0]} was written less than {QUIET_SECONDS / 60:.0f} minutes ago and may still be incomplete "
            "(also in a fresh copy: cp -a and rsync -t keep the times)"
        )
    named = complete.get(folder.latest) if folder.latest is not None else None
    return Repair(latest=None if named else newest.name, aside=tuple(tag.name for tag in broken))


def _age(tag: TagFolder) -> tuple[int, float]:
    """Tags in order: by the step in the name, then by when they were written."""
    return (-1 if tag.step is None else tag.step, tag.modified)


def _is_aside(tag: TagFolder) -> bool:
    return re.search(rf"{re.escape(ASIDE)}(-\d+)?$", tag.name) is not None


def free_name(name: str, taken: frozenset[str]) -> str:
    """The name for a tag that is set aside.

    >>> free_name("global_step4", frozenset({"global_step4.incomplete"}))
    'global_step4.incomplete-2'
    """
    wanted, number = f"{name}{ASIDE}", 2
    while wanted in taken:
        wanted, number = f"{name}{ASIDE}-{number}", number + 1
    return wanted
