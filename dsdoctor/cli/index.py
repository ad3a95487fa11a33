"""The group of commands that look after a package index of wheels."""

from pathlib import Path
from typing import Annotated

from cyclopts import App

from dsdoctor.cli.ending import OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.statuses import OF_GROUP, statuses_line, statuses_of
from dsdoctor.commands.index import merge
from dsdoctor.core.options import argument

app = App(
    name="index",
    version_flags=[],
    help_epilogue=OF_GROUP,
    help="""Look after a package index of DeepSpeed wheels: static files, which any web server or file:// can serve.

    build-wheel --index DIR lists each wheel that it builds. Many jobs build into folders of their own, and one joins them:

    dsdoctor index merge public dist-0 dist-1 dist-2
    """,
)

Index = Annotated[Path, argument(help="The folder of the index; it is made where it is not there.")]


def merge_command(
    index: Index,
    /,
    *folders: Annotated[Path, argument(help="Folders of wheels, or other indexes.")],
    as_json: Json = False,
) -> int:
    """Join the wheels of many builds, with their manifests, in one index. Two different wheels of one name are refused.

    Example: dsdoctor index merge public wheels/a wheels/b
    """
    made = merge(index.absolute(), [folder.absolute() for folder in folders])
    lines = [f"✓ {path.name}" for path in made] + [f"{len(made)} new in {index}"]
    print_result("index merge", as_json, lines, (), index=str(index), wheels=[str(path) for path in made])
    return OK


app.command(merge_command, name="merge", help_epilogue=statuses_line(statuses_of("index merge")))
