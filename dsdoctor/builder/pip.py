"""pip as a fetcher: it knows the user's indexes, proxies and certificates. It never changes an environment here."""

import sys
from collections.abc import Sequence

from dsdoctor.errors import BuildFailed
from dsdoctor.host import LocalHost

LIMIT = 3600.0


def run_pip(host: LocalHost, python: str, arguments: Sequence[str], *, what: str, hint: str) -> None:
    """Run pip of the environment, or ours where it has none. Raises BuildFailed with pip's own error."""
    for interpreter in dict.fromkeys((python, sys.executable)):
        if host.run([interpreter, "-m", "pip", "--version"], timeout=60).ok:
            answer = host.run([interpreter, "-m", "pip", *arguments], timeout=LIMIT)
            if answer.ok:
                return
            raise BuildFailed(f"pip could not fetch {what}: {last_error(answer.stderr)}", hint=hint)
    raise BuildFailed(
        f"neither {python} nor {sys.executable} has pip, which fetches {what}", hint=f"{python} -m ensurepip"
    )


def last_error(text: str) -> str:
    """The line that says why a program failed: its last ERROR line, else its last line.

    >>> last_error("ERROR: No matching distribution found for x\\n[notice] a new pip\\n")
    'ERROR: No matching distribution found for x'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
