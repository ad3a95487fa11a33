"""What a DeepSpeed configuration decides -> the ops that a training with it loads, each with the reason. Pure."""

from collections.abc import Iterable

from dsdoctor.builder.source.load_sites import LoadSite
from dsdoctor.builder.source.op_loads import LOADS, NOT_BY_CONFIG
from dsdoctor.builder.source.training_config import TrainingConfig


def ops_of_config(configs: Iterable[TrainingConfig], *, accelerator: str) -> dict[str, str]:
    """Each op with the reason, in a stable order. ``accelerator`` is "cuda" or "cpu".

    >>> list(ops_of_config([TrainingConfig(optimizer="adamw", stage=3, optimizer_device="cpu", param_device="nvme")],
    ...     accelerator="cuda"))
    ['async_io', 'cpu_adam', 'pin_memory']
    """
    found: dict[str, str] = {}
    for config in configs:
        for load in LOADS:
            reason = load.when(config) if accelerator in load.accelerators else ""
            if reason:
                found.setdefault(load.op, reason)
    return dict(sorted(found.items()))


def unknown_sites(sites: Iterable[LoadSite]) -> tuple[LoadSite, ...]:
    """Those of a DeepSpeed that loads ops where the table knows of none: another version than it was written for."""
    known = {(load.file, load.function, load.op) for load in LOADS}
    others = tuple(entry.place for entry in NOT_BY_CONFIG)
    return tuple(
        site for site in sites if (site.file, site.function, site.op) not in known and not site.file.startswith(others)
    )
