"""docker/compose.yaml -> what a profile starts, for whoever plays it without Docker. Starts nothing itself."""

import functools
import re
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"


@functools.cache
def document() -> dict[str, Any]:
    """The whole file, its anchors and merges resolved; variables of the shell are left as they stand."""
    found = yaml.safe_load(FILE.read_text())
    assert isinstance(found, dict)
    return found


def of_profile(profile: str) -> dict[str, dict[str, Any]]:
    """The services that ``--profile`` starts, as the file has them."""
    services: dict[str, dict[str, Any]] = document()["services"]
    return {name: one for name, one in services.items() if profile in one["profiles"]}


def services(profile: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """For each service of a profile its command and its environment, as the container gets them."""
    return {
        name: (list(map(str, one["command"])), {key: str(value) for key, value in one["environment"].items()})
        for name, one in of_profile(profile).items()
    }


def mounts(profile: str) -> dict[str, Path]:
    """For each path in the containers of a profile the file or folder of the checkout that is mounted there."""
    volumes = [volume for one in of_profile(profile).values() for volume in one.get("volumes", ())]
    return {volume["target"]: (FILE.parent / volume["source"]).resolve() for volume in volumes}


def variables() -> set[str]:
    """The shell's variables that the file reads. Raises AssertionError for one that has no default."""
    text = "\n".join(line.partition("#")[0] for line in FILE.read_text().splitlines())
    found = re.findall(r"\$\{(\w+):-[^}]+\}", text)
    assert text.count("$") == len(found), "a variable without a default"
    return set(found)
