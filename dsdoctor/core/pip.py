"""pip as a fetcher and installer: it knows the user's indexes, proxies and certificates."""

import shlex
import sys
from collections.abc import Sequence

from dsdoctor.core.errors import BuildFailed, disk_full
from dsdoctor.core.host import LocalHost

LIMIT = 3600.0
OTHER_HASH = "python -m pip config list shows which indexes and proxies pip asks; ask who looks after them"
FREE_SPACE = "free some space (df -h), or name places on another disk: export DSDOCTOR_CACHE=DIR TMPDIR=DIR"


def run_pip(host: LocalHost, python: str, arguments: Sequence[str], *, what: str, hint: str) -> None:
    """Fetch with the pip of the environment, or with ours where it has none. Raises BuildFailed with pip's own error."""
    answer = host.run([*pip_for(host, python, what)[0], *arguments], timeout=LIMIT)
    if not answer.ok:
        raise failed_fetch(f"pip could not fetch {what}: {last_error(answer.stderr)}", answer.stderr, hint)


def install_wheel(host: LocalHost, python: str, wheel: str) -> None:
    """Install a wheel into an environment without touching its dependencies; ours does it where it has no pip."""
    pip, options = pip_for(host, python, "installs the wheel")
    arguments = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall", wheel]
    answer = host.run([*pip, *options, *arguments], timeout=LIMIT)
    if not answer.ok:
        raise BuildFailed(
            f"the wheel is built, and pip could not install it: {last_error(answer.stderr)}",
            hint=f"{python} -m pip install --no-deps --force-reinstall {shlex.quote(wheel)}",
        )


def failed_fetch(message: str, said: str, hint: str) -> BuildFailed:
    """What a program could not fetch. Where its own words, ``said``, name a full disk or another digest, the hint does too."""
    if disk_full(said):
        return BuildFailed(f"the disk is full: {message}", hint=f"{FREE_SPACE}, then run the same command again")
    if "DO NOT MATCH THE HASHES" in said:
        return BuildFailed(f"what came is not what the package index says: {message}", hint=OTHER_HASH)
    return BuildFailed(message, hint=hint)


def pip_for(host: LocalHost, python: str, what: str) -> tuple[list[str], list[str]]:
    """A pip that runs, and the options that point it at the environment of ``python``."""
    if host.run([python, "-m", "pip", "--version"], timeout=60).ok:
        return [python, "-m", "pip"], []
    if host.run([sys.executable, "-m", "pip", "--version"], timeout=60).ok:
        return [sys.executable, "-m", "pip"], ["--python", python]
    raise BuildFailed(f"neither {python} nor {sys.executable} has pip: {what}", hint=f"{python} -m ensurepip")


def last_error(text: str) -> str:
    """The line that says why a program failed: its last ERROR line, else its last line.

    >>> last_error("ERROR: No matching distribution found for x\\n[notice] a new pip\\n")
    'ERROR: No matching distribution found for x'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
