"""The hall that makes targets out of options, and says which of them cannot lie in one folder. Installs nothing."""

import sys
from collections.abc import Sequence

from dsdoctor.builder.plan.choices import choose_local_version
from dsdoctor.builder.targets.interpreters import find_interpreters, is_version
from dsdoctor.builder.targets.targets import Target, cross
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda, Gap, Torch
from dsdoctor.order import Order
from dsdoctor.probe.python import ask_python
from dsdoctor.probe.torch import read_torch


def targets_of(
    pythons: Sequence[str], torches: Sequence[str], cudas: Sequence[str], index: str | None
) -> tuple[Target, ...]:
    """What the options name. Raises UsageError for nonsense, ImpossiblePlan for a Python that is not here."""
    asked = tuple(dict.fromkeys(pythons)) or (sys.executable,)
    if torches:
        return cross(find_interpreters(LocalHost(), asked), tuple(torches), tuple(cudas), index)
    if cudas or index:
        option = "--cuda" if cudas else "--torch-index"
        raise UsageError(f"{option} chooses among builds of torch, and no --torch names one", hint="--torch 2.14.1")
    versions = tuple(one for one in asked if is_version(one))
    found = dict(zip(versions, find_interpreters(LocalHost(), versions), strict=True))
    paths = (found[one].executable if one in found else one for one in asked)
    return tuple(Target(python=path) for path in dict.fromkeys(paths))


def refuse_clashes(order: Order, targets: Sequence[Target]) -> None:
    """Raise UsageError where two wheels would have one file name, as far as that can be told without installing anything."""
    names: dict[tuple[str, ...], Target] = {}
    for target in targets:
        expected = _expected(order, target)
        if expected is not None and names.setdefault(expected, target) is not target:
            raise clash(names[expected], target)


def clash(first: Target, second: Target) -> UsageError:
    """Why two targets cannot be built into one folder."""
    return UsageError(
        f"the wheels for {first.name} and for {second.name} would have the same file name",
        hint="name one, or give each its own --out: DeepSpeed's loader tells torch's major.minor and CUDA release apart, no more",
    )


def _expected(order: Order, target: Target) -> tuple[str, ...] | None:
    """What will tell a target's wheel from others in its name; None where its environment cannot be asked."""
    wish = order.wish
    if target.torch is None:
        environment_ = ask_python(LocalHost(), target.python)
        if isinstance(environment_, Gap) or environment_.torch is None:
            return None
        tag, torch = environment_.python.tag, read_torch(LocalHost(), environment_.torch)
        known = True
    else:
        tag = f"cp{target.minor.replace('.', '')}"
        cuda = None if target.build == "cpu" else Cuda.parse(target.build)
        torch, known = Torch(version=target.torch, location="", cuda=cuda), target.build is not None
    if torch is None:
        return None
    accelerator = wish.accelerator or ("cuda" if torch.cuda else "cpu")
    local, _ = choose_local_version(torch, accelerator, wish)
    unknown = not known and wish.accelerator != "cpu" and wish.local_version is None
    return tag, local, "unknown" if unknown else ""
