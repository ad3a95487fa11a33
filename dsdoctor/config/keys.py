"""Keys that DeepSpeed does not read, refuses, or reads somewhere else. A generator of verdicts for each question."""

from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import Asked, Path, Refusal, Section, dotted, lookup, walk
from dsdoctor.config.names import nearest, plain
from dsdoctor.config.other_names import OTHER_NAMES
from dsdoctor.config.question import Correction, Question, Verdict, shown
from dsdoctor.core.finding import Finding

CHOSEN_BY_NAME = {("optimizer", "params"), ("scheduler", "params")}
"""Sections whose keys are the arguments of a class: ``optimizers.py`` judges them."""
REMARKS = ("_", "#", "//", "$")
"""How names begin that people give to remarks in JSON."""
OTHERS_READ = {
    "msamp": ("accelerate", "utils/dataclasses.py", 'ds_config["msamp"]'),
    "inference": ("transformers", "integrations/deepspeed.py", 'ds_config.get("inference"'),
    "data_parallel_size": ("deepspeed", "__init__.py", 'config["data_parallel_size"]'),
    "sequence_parallel_size": ("deepspeed", "__init__.py", 'config["sequence_parallel_size"]'),
}
"""Keys at the top that others than DeepSpeedConfig read: the package, its file, and the words there."""


WITH_PARAMS = {("optimizer",), ("scheduler",)}
"""Sections whose ``params`` go to what ``type`` names (engine.py, _configure_basic_optimizer); beside it nothing is read."""


def unread_keys(question: Question) -> Iterator[Verdict]:
    """Keys in sections that DeepSpeed looks through by hand, which takes no notice of what it does not know."""
    for path, value in walk(question.config):
        section = question.asked.section(path[:-1])
        if section is None or section.model or path[:-1] in CHOSEN_BY_NAME or _is_known(question.asked, section, path):
            continue
        meant = meanings(question, path, value)
        if not meant and path[:-1] in WITH_PARAMS:
            meant = [(*path[:-1], "params", path[-1])]
        if section.open:
            # who reads which key of it is not known: only a mistake in typing can be told
            if len(meant) == 1 and meant[0][:-1] == path[:-1]:
                yield _unread(question, path, value, meant, certain=False)
            continue
        if not path[-1].startswith(REMARKS):
            yield _unread(question, path, value, meant, certain=True)


def refused_keys(question: Question) -> Iterator[Verdict]:
    """Keys in sections that are pydantic models, which refuse what they do not know."""
    for refusal in question.asked.refusals:
        if refusal.kind == "extra_forbidden" and refusal.paths:
            yield _refused(question, refusal, refusal.paths[0])


def removed_keys(question: Question) -> Iterator[Verdict]:
    """Keys of earlier versions that this one refuses with a text of its own."""
    for refusal in question.asked.refusals:
        if refusal.kind == "DeepSpeedConfigError" and "removed" in refusal.message and len(refusal.paths) == 1:
            path = refusal.paths[0]
            title = f"{dotted(path)} was removed, and DeepSpeed {question.asked.version} refuses to start with it"
            fix = f"take {dotted(path)} out"
            found = Finding.error("config-key-removed", title, evidence=(refusal.message.strip(),), fix=fix)
            yield Verdict(finding=found, path=path, correction=Correction(path=path))


def deprecated_keys(question: Question) -> Iterator[Verdict]:
    """Keys that still work, and say themselves what replaces them."""
    for path, value in walk(question.config):
        key = question.asked.key(path)
        if key is None or not key.deprecated:
            continue
        # DeepSpeed names the field there, and its documents the field's other name
        newer = question.asked.key((*path[:-1], key.instead)) if key.instead else None
        instead = f"{dotted(path[:-1])}.{newer.name if newer else key.instead}" if key.instead else ""
        title = f"{dotted(path)} is deprecated{f': {instead} replaces it' if instead else ''}"
        fix = f"use {instead}" if instead else "take it out"
        found = Finding.warning(
            "config-key-deprecated", title, evidence=(f"{dotted(path)}: {shown(path, value)}",), fix=fix
        )
        yield Verdict(finding=found, path=path)


def meanings(question: Question, path: Path, value: Any) -> list[Path]:
    """Where a key that is none may have been meant to stand, the nearest first; several where that is open."""
    asked, name, here = question.asked, path[-1], path[:-1]
    if path in OTHER_NAMES:
        return list(OTHER_NAMES[path])
    section = asked.section(here)
    near = nearest(name, _names(asked, section)) if section else ()
    same = [(*here, key) for key in near if _fits(asked, (*here, key), value)]
    same = [each for each in same if lookup(question.config, each) is None] or same
    if same and plain(same[0][-1]) == plain(name):
        return same
    elsewhere = [
        other for other in asked.sections if other.path not in CHOSEN_BY_NAME and _is_related(here, other.path)
    ]
    exact = [(*other.path, key) for other in elsewhere for key in _names(asked, other) if plain(key) == plain(name)]
    exact = [each for each in exact if _fits(asked, each, value)]
    if len(exact) == 1 or same:
        return exact if len(exact) == 1 else same
    if exact and name not in _EVERYWHERE:
        return _best(exact, here)
    similar = [
        (*other.path, key) for other in elsewhere for key in nearest(name, _names(asked, other)) if len(name) > 6
    ]
    return _best([each for each in similar if _fits(asked, each, value)], here)


def _is_related(here: Path, there: Path) -> bool:
    """Whether a key could have slipped from one section to the other: out of it, into it, or within the same of the top."""
    return here != there and (not here or not there or here[0] == there[0])


_EVERYWHERE = {"enabled", "type", "params", "device", "name", "profile", "seed", "dtype", "project", "job_name"}
"""Names that stand in so many sections that none was meant."""


def _best(paths: list[Path], here: Path) -> list[Path]:
    """Those nearest to where the key stands: inside it, or around it; else those nearest to the top."""
    if not paths:
        return []
    inside = [each for each in paths if each[: len(here)] == here and here] or [
        each for each in paths if here[:1] == each[:1]
    ]
    paths = inside or paths
    shortest = min(map(len, paths))
    return [each for each in dict.fromkeys(paths) if len(each) == shortest]


def _fits(asked: Asked, path: Path, value: Any) -> bool:
    """Whether a value could stand there: a section for a section, and no section for a value."""
    is_section = asked.section(path) is not None
    return is_section == isinstance(value, dict) or (is_section and isinstance(value, bool))


def _names(asked: Asked, section: Section) -> list[str]:
    return [name for name in section.names if section.path or name not in asked.removed]


def _is_known(asked: Asked, section: Section, path: Path) -> bool:
    return path[-1] in section.names or (not section.path and (path[-1] in OTHERS_READ or path[-1] in asked.removed))


def _unread(question: Question, path: Path, value: Any, meant: list[Path], *, certain: bool) -> Verdict:
    version, said = question.asked.version, f"{dotted(path)}: {shown(path, value)}"
    if not meant:
        title = f"DeepSpeed {version} does not read {dotted(path)}, and says nothing about it"
        fix = "take it out, or look the key up: it may be one of another version"
        return Verdict(finding=Finding.warning("config-key-ignored", title, evidence=(said,), fix=fix), path=path)
    right = " or ".join(map(dotted, meant))
    moved = meant[0][:-1] != path[:-1]
    rule = "config-key-misplaced" if moved else "config-key-misspelt"
    if moved:
        title = f"DeepSpeed does not look for {dotted(path)}, but for {right}: it is silently ignored"
        fix = f"move it: {right}"
    else:
        title = f"{dotted(path)} is not a DeepSpeed key and is silently ignored: {right} is one"
        fix = f"write {right}"
    if any(lookup(question.config, each) is not None for each in meant):
        fix = f"take it out, or correct {right}, which is there too"
    make = Finding.error if certain else Finding.warning
    return Verdict(
        finding=make(rule, title, evidence=(said,), fix=fix), path=path, correction=_rename(question, path, meant)
    )


def _refused(question: Question, refusal: Refusal, path: Path) -> Verdict:
    value = lookup(question.judged, path)
    meant = meanings(question, path, value)
    said = f"{refusal.model}: {refusal.message} ({dotted(path)}: {shown(path, value)})"
    if not meant:
        title = f"{dotted(path[:-1])} has no key {path[-1]} in DeepSpeed {question.asked.version}, which refuses to start with it"
        found = Finding.error("config-key-refused", title, evidence=(said,), fix="take it out")
        return Verdict(finding=found, path=path, correction=Correction(path=path))
    right = " or ".join(map(dotted, meant))
    moved = meant[0][:-1] != path[:-1]
    rule = "config-key-misplaced" if moved else "config-key-misspelt"
    title = f"{dotted(path)} is refused: {'it belongs to' if moved else 'the key is'} {right}"
    found = Finding.error(rule, title, evidence=(said,), fix=f"{'move it:' if moved else 'write'} {right}")
    return Verdict(finding=found, path=path, correction=_rename(question, path, meant))


def _rename(question: Question, path: Path, meant: list[Path]) -> Correction | None:
    """The correction, where one name only is meant and nothing stands there yet."""
    if len(meant) != 1 or lookup(question.config, meant[0]) is not None:
        return None
    if meant[0][:-1] in CHOSEN_BY_NAME and lookup(question.config, (meant[0][0], "type")) is None:
        # parameters alone are no optimizer
        return None
    return Correction(path=path, to=meant[0])
