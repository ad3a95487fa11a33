"""A line -> whether somebody only says it: a warning, what a logger tells, a sentence that quotes an error."""

import re

from dsdoctor.diagnosis.failures import EXCEPTION_LINE

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


BLAMES = re.compile(
    r"rror\b|ERROR|Exception|[Ff]ail|FAIL|FATAL|[Ff]atal|CRITICAL|[Cc]aused|what\(\)|[Rr]aised|[Tt]erminat|[Cc]rash|WARN"
)
FIRST_HAND = re.compile(r"\[[^\]]{0,100}\.(?:cpp|cc|cu|h):\d|\S{1,80} \[\d{1,3}\] NCCL |\S{1,80}\.(?:cpp|cc|cu|h):\d")
"""What torch's C++ and NCCL write of themselves."""

HEADER = re.compile(r"^(?:\[[^\]]{0,120}\] ?){1,4}")
NAMED = re.compile(r"\b[\w.]{0,80}(?:Error|Exception): ")
WORD = re.compile(r"[^\W\d_]{2,}")
"""Two words and more stand before an error where it is quoted."""


def is_quoted(text: str, start: int, sample: str) -> bool:
    """Whether an exception, which a process prints at the head of a line, stands within a sentence that blames nobody.

    ``start``: where in the clean text the pattern was found. ``sample``: how the line looks where a process fails of it.

    >>> sample = "RuntimeError: CUDA error: invalid device ordinal"
    >>> is_quoted("how do I mend RuntimeError: CUDA error: invalid device ordinal", 14, sample)
    True
    >>> is_quoted("the worker failed: RuntimeError: CUDA error: invalid device ordinal", 18, sample), is_quoted(sample, 0, sample)
    (False, False)
    """
    if not EXCEPTION_LINE.match(sample) or EXCEPTION_LINE.match(text) or FIRST_HAND.match(text):
        return False
    before = NAMED.split(HEADER.sub("", text[:start][-300:]))[0]
    return len(WORD.findall(before)) > 1 and not BLAMES.search(before.rstrip().removesuffix(":"))
