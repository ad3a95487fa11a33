"""A raw line -> whether somebody only says it: a warning, or what a logger tells, in contrast to a process that fails of it."""

import re

HEAD = 260
"""A level or the name of a warning stands within so many bytes of the line's head."""

SAID = re.compile(
    rb"\[(?:WARNING|WARN|INFO|DEBUG|NOTICE)\b|\b(?:WARNING|INFO|DEBUG)(?: {0,5}[|:\]-]| \d)|\b[A-Z]\w{2,40}Warning: "
    rb"|(?:^|[\s\]:\[])[WI]\d{3,4} \d\d:\d\d:\S{2,12} (?:\d{1,9} )?\S{1,120}\.py:\d"
)
"""What C++ warns of is none of these, NCCL's WARN neither: it says at first hand what went wrong."""


def is_said(raw: bytes) -> bool:
    """Whether a line is a warning or a notice.

    >>> is_said(b"[rank2]: [2026-11-22 10:00:07,123] [WARNING] [x.py:7:f] no nvcc"), is_said(b"/v/x.py:3: UserWarning: no nvcc")
    (True, True)
    >>> is_said(b"W1122 10:00:07.117000 412 torch/x.py:12] no nvcc"), is_said(b"n1:7:9 [0] NCCL WARN Duplicate GPU detected")
    (True, False)
    """
    head = raw.rstrip(b"\r\n").rpartition(b"\r")[2][:HEAD]
    return bool(SAID.search(head))
