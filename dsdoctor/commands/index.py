"""index merge: the wheels that many jobs built, in folders of their own -> one package index. Nothing of a wheel is run."""

from collections.abc import Sequence
from pathlib import Path

from dsdoctor.builder.make.make_wheel import prepare_out
from dsdoctor.builder.wheel.index import PROJECT, list_wheels, publish, wheels_of
from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.errors import UsageError


def merge(index: Path, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Put the wheels of folders or of other indexes into an index and list them; the paths of those that are new there.

    Raises UsageError for a folder without wheels, and for two different wheels of one name, before anything is written.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        wheels = wheels_of(folder)
        if not wheels:
            raise UsageError(f"no deepspeed-*.whl lies in {folder}", hint="name the --out folders of the builds")
        for wheel in wheels:
            _same(found.setdefault(wheel.name, wheel), wheel)
    new = []
    for name, wheel in sorted(found.items()):
        there = index / PROJECT / name
        if there.exists():
            _same(there, wheel)
        else:
            new.append(wheel)
    prepare_out(index, "INDEX")
    made = tuple(publish(wheel, index) for wheel in new)
    list_wheels(index)
    return made


def _same(first: Path, second: Path) -> None:
    if first != second and hex_of(first) != hex_of(second):
        raise UsageError(
            f"{first} and {second} are different wheels of one name", hint="keep one; wheels of dsdoctor bear a tag"
        )
