"""Rank 0's JSON document -> its Report. What another host wrote has no steps: its commands are told as evidence."""

from dataclasses import dataclass
from typing import Any

import msgspec

from dsdoctor.comm.results import Report
from dsdoctor.hosts.remote_finding import RemoteFinding


@dataclass(frozen=True, kw_only=True)
class _Own:
    report: Report | None = None


@dataclass(frozen=True, kw_only=True)
class _RemotePhase:
    findings: tuple[RemoteFinding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _RemoteReport:
    phases: tuple[_RemotePhase, ...]


@dataclass(frozen=True, kw_only=True)
class _Remote:
    report: _RemoteReport | None = None


def read_own_report(document: str) -> Report | None:
    """The report of a rank 0 that is a process of this machine, started by us; None where the document holds none."""
    try:
        return msgspec.json.decode(document, type=_Own).report
    except msgspec.MsgspecError:
        return None


def read_remote_report(document: str) -> Report | None:
    """The report of a rank 0 on another host, which may have written anything; None where the document holds none."""
    try:
        whole: dict[str, Any] = msgspec.json.decode(document, type=dict[str, Any])
        told = msgspec.convert(whole, type=_Remote).report
        if told is None:
            return None
        for phase, read in zip(whole["report"]["phases"], told.phases, strict=True):
            phase["findings"] = msgspec.to_builtins([finding.ours() for finding in read.findings])
        return msgspec.convert(whole["report"], type=Report)
    except (msgspec.MsgspecError, RecursionError):
        return None
