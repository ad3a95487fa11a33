"""The command that lists wheels in a package index: wheel index. Nothing of a wheel is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from dsdoctor.builder.make.make_wheel import prepare_out
from dsdoctor.builder.wheel.index import PROJECT, list_wheels, publish, wheels_of
from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.cli.ending import OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument

Index = Annotated[Path, argument(help="Folder of the index; created if missing.")]


def merge(index: Path, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Put the wheels of folders or of other indexes into an index and list them; the paths of those that are new there.

    Raises UsageError for a folder without wheels, and for two different wheels of one name, before anything is written.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        wheels = wheels_of(folder)
        if not wheels:
            raise UsageError(f"there is no deepspeed-*.whl in {folder}", hint="name the --out folders of the builds")
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
            f"{first} and {second} are different wheels with the same name",
            hint="keep one; dsdoctor's wheels have a content tag",
        )


def index_command(
    index: Index,
    /,
    *folders: Annotated[Path, argument(help="Folders of wheels, or other indexes.")],
    as_json: Json = False,
) -> int:
    """Merge the wheels of many builds, with their manifests, into a package index.

    The index is static files for any web server or file://. Different wheels with the same name are an error.
    build-wheel --index DIR lists each wheel that it builds. Parallel jobs build into separate folders, and one job merges them.

    Example: dsdoctor wheel index public wheels/a wheels/b
    """
    made = merge(index.absolute(), [folder.absolute() for folder in folders])
    lines = [f"✓ {path.name}" for path in made] + [f"{len(made)} new in {index}"]
    print_result("wheel index", as_json, lines, (), index=str(index), wheels=[str(path) for path in made])
    return OK
