"""An sdist, as .tar.gz or .zip -> a folder, with nothing written outside of it and nothing left when it is broken."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

from dsdoctor.core.errors import DoctorError, UsageError


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an sdist's single top folder as ``folder``. Raises UsageError for what is no sdist, or reaches outside."""
    staging = folder.with_name(f".{folder.name}.unpack")
    staging.mkdir(parents=True)
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, staging)
        else:
            _untar(archive, staging)
        tops = [path for path in staging.iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise UsageError(f"{archive} is no sdist: it holds {len(tops)} top folders, an sdist holds one")
        tops[0].replace(folder)
    except DoctorError:
        raise
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise UsageError(
            f"{archive} is no readable sdist: {error}",
            hint="fetch it again: python -m pip download --no-deps deepspeed",
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _untar(archive: Path, staging: Path) -> None:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(staging, filter="data")
            return
        # Debian 12's Python 3.11.2 has no filters yet
        members = tar.getmembers()
        for member in members:
            target = Path(member.name).parent / member.linkname if member.issym() else Path(member.name)
            inside = ".." not in os.path.normpath(target).split("/") and not target.is_absolute()
            if not inside or not (member.isfile() or member.isdir() or member.issym()):
                raise UsageError(f"{archive} holds {member.name!r}, which reaches outside of it or is no file")
        tar.extractall(staging, members)  # noqa: S202 - every member was checked above


def _unzip(archive: Path, staging: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if name.startswith("/") or ".." in Path(name).parts:
                raise UsageError(f"{archive} holds {name!r}, which lies outside of it")
        file.extractall(staging)  # noqa: S202 - every name was checked above
