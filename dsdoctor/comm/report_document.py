"""Rank 0's JSON document -> its Report. What another host wrote has no steps: its commands are told as evidence."""

from dataclasses import dataclass
from typing import Any

import msgspec

from dsdoctor.comm.results import Report
from dsdoctor.hosts.ssh import RemoteFinding


@dataclass(frozen=True, kw_only=True)
class _Document:
    report: Report | None = None


def read_own_report(document: str) -> Report | None:
    """The report of a rank 0 that is a process of this machine, started by us; None where the document holds none."""
    try:
        return msgspec.json.decode(document, type=_Document).report
    except msgspec.MsgspecError:
        return None


def read_remote_report(document: str) -> Report | None:
    """The report of a rank 0 on another host, which may have written anything; None where the document holds none."""
    try:
        whole: Any = msgspec.json.decode(document)
        for phase in whole["report"]["phases"]:
            told = msgspec.convert(phase.get("findings", ()), type=tuple[RemoteFinding, ...])
            phase["findings"] = msgspec.to_builtins([finding.ours() for finding in told])
        return msgspec.convert(whole, type=_Document).report
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError):
        # what stands there is no object, or no list
        return None
