"""A tag that is whole -> what a run must have beside its files: classes of the script, parameters that were left out."""

import _compat_pickle
import sys
from collections.abc import Iterator

from dsdoctor.checkpoint.examine import Examined
from dsdoctor.checkpoint.frozen import without_frozen
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more

OLD_NAMES = {name.partition(".")[0] for name in _compat_pickle.IMPORT_MAPPING}
"""Modules by the names that they had in Python 2, under which torch.save writes them: __builtin__.set."""
AT_HAND = {"torch", "deepspeed", "numpy", *sys.stdlib_module_names, *OLD_NAMES} - {"__main__"}
"""Packages that every run with DeepSpeed has."""


def judge_conditions(examined: Examined) -> tuple[Finding, ...]:
    """What load_checkpoint asks for that the files do not have."""
    return (*_foreign_classes(examined), *_frozen_excluded(examined))


def _foreign_classes(examined: Examined) -> Iterator[Finding]:
    needed: dict[str, str] = {}
    for shard in examined.tag.shards:
        for name in sorted(shard.file.names):
            if name.partition(".")[0] not in AT_HAND:
                needed.setdefault(name, shard.file.path.name)
    if needed:
        yield Finding.warning(
            "checkpoint-needs-classes",
            f"{examined.tag.folder.name} holds objects of {and_more(tuple(needed), 3)}: it loads where that can be imported",
            evidence=[f"{name} in {file}" for name, file in list(needed.items())[:6]],
            fix="load it in a script that has them; save numbers, lists and dictionaries in client_state instead",
        )


def _frozen_excluded(examined: Examined) -> Iterator[Finding]:
    if without_frozen(examined) and not examined.facts.universal:
        yield Finding.warning(
            "checkpoint-frozen-excluded",
            f"{examined.tag.folder.name} was saved with exclude_frozen_parameters: frozen parameters of the model are not in it",
            evidence=(
                f"{len(examined.parameters)} trained parameters are in it",
                "load_checkpoint raises 'Missing key(s) in state_dict' where the model has frozen ones",
                "with load_module_strict=False it loads without a word, and leaves those as the model was made: random where no "
                "base model was loaded",
            ),
            fix="where the model has frozen parameters, take them from the base model and load with "
            "load_checkpoint(..., load_module_strict=False)",
        )
