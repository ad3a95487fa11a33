"""uv or pip -> a new environment with packages in it. pip where the user has configured it: uv ignores that configuration."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.targets.interpreters import find_uv
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import LIMIT, failed_fetch, pip_for, why_failed

STEERS = frozenset(
    {"index-url", "extra-index-url", "find-links", "no-index", "constraint", "cert", "client-cert", "proxy"}
)
"""The settings of pip that say where packages come from, and how they are reached."""

MAKING = 600.0
"""Seconds that making an empty environment may take."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Installer:
    """Makes environments of the interpreter ``base``. ``uv`` is the path of uv, None where pip is used."""

    host: LocalHost
    base: str
    uv: str | None
    because: str

    def make(self, folder: Path) -> None:
        """Make an empty environment. Raises BuildFailed."""
        ways = (
            [[self.uv, "venv", "--quiet", "--no-project", "--seed", "--python", self.base, str(folder)]]
            if self.uv
            else [
                [self.base, "-m", "venv", str(folder)],
                # Debian's Python may lack ensurepip; dsdoctor's own pip serves then
                [self.base, "-m", "venv", "--clear", "--without-pip", str(folder)],
            ]
        )
        for argv in ways:
            answer = self.host.run(argv, timeout=MAKING)
            if answer.ok:
                return
        raise BuildFailed(
            f"{self.base} could not make an environment: {why_failed(self.host, answer.stderr or answer.stdout)}",
            hint="on Debian and Ubuntu: apt install python3-venv; or name another with --python PATH",
        )

    def install(self, python: str, arguments: Sequence[str]) -> None:
        """Install into the environment of ``python``. Raises BuildFailed with the program's own error."""
        if self.uv:
            argv = [self.uv, "pip", "install", "--quiet", "--python", python, *arguments]
        else:
            pip, options = pip_for(self.host, python, "installs torch")
            argv = [*pip, *options, "install", "--quiet", "--disable-pip-version-check", *arguments]
        answer = self.host.run(argv, timeout=LIMIT)
        if not answer.ok:
            what = " ".join(word for word in arguments if not word.startswith("-") and "://" not in word)
            why = why_failed(self.host, answer.stderr)
            message = f"{'uv' if self.uv else 'pip'} could not install {what}: {why}"
            hint = "check the network and the versions; --torch-index URL names another index"
            raise failed_fetch(message, answer.stderr, hint)


def choose_installer(host: LocalHost, base: str) -> Installer:
    """uv where it is installed and the user has not told pip where packages come from, else pip; with the reason."""
    uv = find_uv(host)
    if uv is None:
        return Installer(host=host, base=base, uv=None, because="pip")
    config = host.run([sys.executable, "-m", "pip", "config", "list"], timeout=60)
    if steering := parse_steering(config.stdout):
        return Installer(host=host, base=base, uv=None, because=f"pip: uv would ignore its {', '.join(steering)}")
    return Installer(host=host, base=base, uv=uv, because="uv")


def parse_steering(config: str) -> tuple[str, ...]:
    """The settings in ``pip config list`` that decide where packages come from.

    >>> parse_steering("global.find-links='/opt/wheels'\\n:env:.disable-pip-version-check='1'\\n")
    ('find-links',)
    """
    named = re.findall(r"^\S+?\.([\w-]+)=", config, re.MULTILINE)
    return tuple(sorted(STEERS.intersection(named)))
