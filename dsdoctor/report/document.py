"""Data -> the one JSON document that ``--json`` prints."""

from typing import Any

from dsdoctor.core.finding import Finding
from dsdoctor.core.text import encode

SCHEMA = "dsdoctor/1"


def document(command: str, findings: tuple[Finding, ...], **parts: Any) -> str:
    """One document of a command: its own parts, then the findings.

    >>> print(document("toolkit", (), toolkit=None))
    {"schema":"dsdoctor/1","command":"toolkit","toolkit":null,"findings":[]}
    """
    whole = {"schema": SCHEMA, "command": command, **parts, "findings": findings}
    return encode(whole).decode()
