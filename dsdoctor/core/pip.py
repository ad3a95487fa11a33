"""pip as a fetcher and installer: it knows the user's indexes, proxies and certificates."""

import sys
from collections.abc import Sequence

from dsdoctor.core.errors import BuildFailed, disk_full
from dsdoctor.core.files import PRIVATE, write_text
from dsdoctor.core.finding import step
from dsdoctor.core.host import Answer, LocalHost
from dsdoctor.core.redaction import Hidden
from dsdoctor.core.workspace import temporary_folder

TIMEOUT_SECONDS = 3600.0
PIP = (
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); from runpy import run_module; "
    "run_module('pip', run_name='__main__', alter_sys=True)",
)
"""As ``-m pip``, which would take a pip.py of the current folder for it, whoever put that there."""
OTHER_HASH = "python -m pip config list shows which indexes and proxies pip asks; ask their administrator"
FREE_SPACE = "free some space (df -h), or name places on another disk: export DSDOCTOR_CACHE=DIR TMPDIR=DIR"


def run_pip(host: LocalHost, python: str, arguments: Sequence[str], *, what: str, hint: str) -> None:
    """Fetch with the pip of the environment, or with ours where it has none. Raises BuildFailed with pip's own error."""
    answer = host.run([*pip_for(host, python, what)[0], *arguments], timeout=TIMEOUT_SECONDS)
    if not answer.ok:
        message = f"pip could not fetch {what}: {why_failed(host, answer.stderr)}"
        raise failed_fetch(message, answer.stderr, hint)


def install_wheel(host: LocalHost, python: str, wheel: str, *, uv: str | None = None) -> None:
    """Install a wheel into an environment without touching its dependencies.

    The environment's own pip does it, or ours where it has none, or ``uv`` (its path) where there is no pip at all.
    """
    answer = _install(host, python, ["--no-deps", "--force-reinstall", wheel], uv)
    if not answer.ok:
        raise BuildFailed(
            f"the wheel was built, but could not be installed: {why_failed(host, answer.stderr)}",
            hint=step("{python} -m pip install --no-deps --force-reinstall {wheel}", python=python, wheel=wheel).line,
        )


def install_needs(host: LocalHost, python: str, wheel: str, torch: str, *, uv: str | None = None) -> str | None:
    """Install what an installed wheel needs beside itself, and leave torch as it is; the reason where that fails."""
    with temporary_folder() as folder:
        constraints = folder / "torch.txt"
        write_text(constraints, f"torch=={torch}\n", mode=PRIVATE)
        answer = _install(host, python, ["--constraint", str(constraints), wheel], uv)
    return None if answer.ok else why_failed(host, answer.stderr)


def _install(host: LocalHost, python: str, arguments: Sequence[str], uv: str | None) -> Answer:
    try:
        pip, options = pip_for(host, python, "installs the wheel")
    except BuildFailed:
        if uv is None:
            raise
        return host.run([uv, "pip", "install", "--quiet", "--python", python, *arguments], timeout=TIMEOUT_SECONDS)
    quiet = ["install", "--quiet", "--disable-pip-version-check"]
    return host.run([*pip, *options, *quiet, *arguments], timeout=TIMEOUT_SECONDS)


def failed_fetch(message: str, said: str, hint: str) -> BuildFailed:
    """What a program could not fetch. Where its own words, ``said``, name a full disk or another digest, the hint does too."""
    if disk_full(said):
        return BuildFailed(f"the disk is full: {message}", hint=f"{FREE_SPACE}, then rerun")
    if "DO NOT MATCH THE HASHES" in said:
        return BuildFailed(f"the download does not match the package index: {message}", hint=OTHER_HASH)
    return BuildFailed(message, hint=hint)


def pip_for(host: LocalHost, python: str, what: str) -> tuple[list[str], list[str]]:
    """A pip that runs, and the options that point it at the environment of ``python``."""
    if host.run([python, *PIP, "--version"], timeout=60).ok:
        return [python, *PIP], []
    if host.run([sys.executable, *PIP, "--version"], timeout=60).ok:
        return [sys.executable, *PIP], ["--python", python]
    raise BuildFailed(
        f"neither {python} nor {sys.executable} has pip: {what}", hint=step("{python} -m ensurepip", python=python).line
    )


def why_failed(host: LocalHost, text: str) -> str:
    """The line that says why a program failed, without what the environment hides."""
    return Hidden(host.environment()).out_of(last_error(text))


def last_error(text: str) -> str:
    """The line that says why a program failed: its last ERROR line, else its last line.

    >>> last_error("ERROR: No matching distribution found for x\\n[notice] a new pip\\n")
    'ERROR: No matching distribution found for x'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]
