"""NCCL's own view of a running job (RAS, since NCCL 2.24), where it answers on this host -> what it complains of. Looks."""

import socket
import time
from collections.abc import Iterator, Mapping

VARIABLE, USUAL = "NCCL_RAS_ADDR", "localhost:28028"
QUESTION = b"verbose status\n"
LONGEST, LARGEST = 8.0, 1 << 20
"""Seconds: RAS gathers from all processes, and waits for those that do not answer; bytes."""
SECTIONS, MOST = ("Errors", "Warnings"), 12


def complaints(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The lines of RAS's errors and warnings, or that it has none; empty where nobody answers."""
    text = asked(environment.get(VARIABLE) or USUAL)
    if not text.strip():
        return ()
    found = tuple(lines_of(text))[:MOST]
    return found or ("NCCL's RAS answers and sees no error",)


def asked(address: str) -> str:
    """What RAS says; "" where it does not answer."""
    host, _, port = address.rpartition(":")
    answer, last = bytearray(), time.monotonic() + LONGEST
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=1.0) as connection:
            connection.sendall(QUESTION)
            while len(answer) < LARGEST and (left := last - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(1 << 16)
                if not part:
                    break
                answer += part
    except (OSError, ValueError):
        return answer.decode(errors="replace")
    return answer.decode(errors="replace")


def lines_of(text: str) -> Iterator[str]:
    """The lines of the sections that name errors and warnings.

    >>> told = ["Errors", "======", "", "DEAD", "  1 job process is considered dead", "", "Warnings", "========", "", "TIMEOUT"]
    >>> list(lines_of("\\n".join(["Job summary", "===", "4 8", *told])))
    ['NCCL: DEAD', 'NCCL: 1 job process is considered dead', 'NCCL: TIMEOUT']
    """
    lines = text.splitlines()
    inside = False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if below.startswith("===") and line.strip():
            inside = line.strip().partition("...")[0] in SECTIONS
        elif inside and line.strip() and not line.startswith("==="):
            yield f"NCCL: {line.strip()[:160]}"
