"""Snapshots of machines -> what differs between them."""

from pathlib import Path

from dsdoctor.checks.compare import FactDifference, compare
from dsdoctor.probe.observe import observe


def differences(files: tuple[Path, ...]) -> tuple[FactDifference, ...]:
    """What differs between snapshots, which are named after their files."""
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return compare({name: observe("", file, whole=True).machine for name, file in zip(names, files, strict=True)})
