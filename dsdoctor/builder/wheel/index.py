"""Wheels -> a folder that pip can use as a package index (PEP 503, with metadata files, PEP 658). Nothing of a wheel is run.

``DIR/deepspeed/`` holds the wheels, their manifests and metadata, ``index.html`` there the links. Any web server can
serve it, and so can ``file://``. Every file appears by rename; the pages are written again from the wheels that are there.
"""

import html
import shutil
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from packaging.metadata import parse_email

from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.files import make_folder, replacing, write_bytes

PROJECT = "deepspeed"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{body}</body>
</html>
"""


def publish(wheel: Path, index: Path) -> Path:
    """Copy a wheel, with the manifest beside it, into an index and list it. Returns the path of the copy."""
    folder = index / PROJECT
    make_folder(folder)
    manifest = wheel.with_name(f"{wheel.name}.json")
    for source in (manifest, wheel):
        if source.exists():
            with source.open("rb") as content, replacing(folder / source.name) as copy:
                shutil.copyfileobj(content, copy)
    list_wheels(index)
    return folder / wheel.name


def list_wheels(index: Path) -> None:
    """Write the pages of an index for the wheels that are in it."""
    links = [_link(wheel) for wheel in wheels_of(index)]
    _write(index / PROJECT / "index.html", PAGE.format(title=f"Links for {PROJECT}", body="".join(links)).encode())
    root = f'<a href="{PROJECT}/">{PROJECT}</a>\n'
    _write(index / "index.html", PAGE.format(title="Simple index", body=root).encode())


def wheels_of(folder: Path) -> tuple[Path, ...]:
    """The DeepSpeed wheels of a folder or of an index, sorted by name."""
    inside = folder / PROJECT
    return tuple(sorted((inside if inside.is_dir() else folder).glob(f"{PROJECT}-*.whl")))


def _link(wheel: Path) -> str:
    attributes = [("href", f"{quote(wheel.name)}#sha256={hex_of(wheel)}")]
    metadata = _metadata(wheel)
    if metadata is not None:
        _write(wheel.with_name(f"{wheel.name}.metadata"), metadata)
        attributes += [("data-core-metadata", f"sha256={sha256(metadata).hexdigest()}")]
        attributes += [("data-requires-python", asked) for asked in _requires_python(metadata)]
    written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes)
    return f"<a {written}>{html.escape(wheel.name)}</a><br>\n"


def _metadata(wheel: Path) -> bytes | None:
    """The METADATA file of a wheel; None for one that cannot be read: it is listed without metadata."""
    try:
        with zipfile.ZipFile(wheel) as file:
            name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
            return file.read(name)
    except (OSError, zipfile.BadZipFile, StopIteration, RuntimeError, NotImplementedError):
        return None


def _requires_python(metadata: bytes) -> Iterator[str]:
    asked = parse_email(metadata)[0].get("requires_python")
    if asked:
        yield asked


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step, unless it has that content already."""
    if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
        write_bytes(path, content)
