"""A line -> whether somebody only says it: a warning, what a logger tells, a sentence that quotes an error."""

import re
from dataclasses import dataclass

from dsdoctor.diagnosis.failures import EXCEPTION_LINE

HEAD = 260
"""A level or the name of a warning stands within so many bytes of the line's head."""

SAID = re.compile(
    rb"\[(?:WARNING|WARN|INFO|DEBUG|NOTICE)\b|\b(?:WARNING|INFO|DEBUG)(?: {0,5}[|:\]-]| \d)|\b[A-Z]\w{2,40}Warning: "
    rb"|(?:^|[\s\]:\[])[WI]\d{3,4} \d\d:\d\d:\S{2,12} (?:\d{1,9} )?\S{1,120}\.py:\d"
    rb"|(?:^|\]:? )(?:[Ww]arning|[Nn]ote|[Hh]int): |(?:^|\]:? |\d )(?:WARNING|INFO|DEBUG) {1,8}\S|\[(?:warning|info|debug) *\] "
    rb"|(?:^|[\s:])'\((?:MaxRetry|ReadTimeout|ConnectTimeout|Protocol|SSL|Connection)Error\("  # huggingface_hub, as it tries again
    rb"|[\"']level(?:name)?[\"']: ?[\"'](?i:warn|info|debug)"
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


AGENT = (
    r"^.{0,60}?\b(?:ts|time|t)=\S{8,60} (?:.{0,80} )?(?:level|lvl|severity)=[\"']?(?i:err|warn|fatal|crit|info)\w{0,6}\b"
    r".{0,300}\bmsg="
)
"""How daemons of clusters log (logfmt): ``ts=... level=error component=agent msg="..."``."""


def is_of_an_agent(text: str, sample: str) -> bool:
    """Whether a daemon's own log line tells an exception of Python: one of its own program, or of another one.

    >>> sample = "RuntimeError: Expected all tensors to be on the same device"
    >>> is_of_an_agent(f'ts=2026-11-22T10:00:07Z level=error component=agent msg="{sample}"', sample)
    True
    >>> is_of_an_agent('time="2026-11-22T10:00:07Z" level=fatal msg="no space left"', "no space left")
    False
    >>> is_of_an_agent(sample, sample)
    False
    """
    return "msg=" in text and bool(EXCEPTION_LINE.match(sample)) and bool(re.match(AGENT, text))


BLAMES = re.compile(
    r"rror\b|ERROR|Exception|[Ff]ail|FAIL|FATAL|[Ff]atal|CRITICAL|[Cc]aused|what\(\)|[Rr]aised|[Tt]erminat|[Cc]rash|WARN"
)
FIRST_HAND = re.compile(r"\[[^\]]{0,100}\.(?:cpp|cc|cu|h):\d|\S{1,80} \[\d{1,3}\] NCCL |\S{1,80}\.(?:cpp|cc|cu|h):\d")
"""What torch's C++ and NCCL write of themselves."""

HEADER = re.compile(r"^(?:\[[^\]]{0,120}\] ?){1,4}")
NAMED = re.compile(r"\b[\w.]{0,80}(?:Error|Exception): ")
WORD = re.compile(r"[^\W\d_]{2,}")
"""Two words and more stand before an error where it is quoted."""


PROSE = re.compile(
    r"(?<![^\s(])(?:[Ii]f|[Ww]hen(?:ever)?|[Ss]ee|may|might|could|should|[Hh]ow|[Ww]hy|like|such as|e\.g\.|[Aa]fter|[Aa]voids?"
    r"|[Ff]ixe[sd]|[Ii]n case)(?=[\s,])"
)
"""Words that speak of an error that may come, not of one that came."""

SHOWN = re.compile(
    r"\++ [a-z./]|(?:Collecting|Downloading|Using cached|Requirement already satisfied|Obtaining|Processing):? "
)
"""How a shell shows the command that it runs next (set -x), and how pip names what it takes."""

SOURCE = re.compile(
    r"(?:raise|assert|return |print\(|self\.warning|warnings\.warn|logger?\.|"
    r"if |elif |except |f?[\"'].{0,4000}[\"'][)\\,]{0,3}$|# |\^)"
)
"""Lines of source code that a traceback or a compiler repeats: they hold messages that were not (yet) printed."""

PROMPT = re.compile(
    r"(?:\([\w.-]{1,40}\) )?(?:\[?[\w.-]{1,40}@[\w.-]{1,60}[: ][^\s$#%]{0,120}\]?)?[$%] (?=[\w./~(])|(?:\([\w.-]{1,40}\) )?"
    r"[\w.-]{1,40}@[\w.-]{1,60}:[^\s$#]{0,120}# (?=[\w./~(])|(?:PS )?[A-Z]:\\[^>]{0,120}> ?(?=[\w./])"
)
"""A shell's prompt, behind which somebody typed a command: nothing was run yet, so nothing failed."""

OPENING = re.compile(r"(?:^|[\s(\[{=:,])([\"'`])(?=[\w/.])")
KEY_OF_AN_ERROR = re.compile(
    r"(?i)(?:log|messages?|msg|err(?:or)?s?|std(?:err|out)|output|text|line|exc(?:eption|_info)?|traceback|reason|details?"
    r"|textpayload|cause|what|status|state)[\"'`]?\s{0,2}[:=]\s{0,2}[\"'`]?$"
)
"""Under which key a program puts what it failed of."""


def is_quoted(text: str, start: int, sample: str, pattern: str = "") -> bool:
    """Whether an exception, which a process prints at the head of a line, stands within a sentence that blames nobody,
    or a line of any kind stands in quotes, in a command that a shell shows, or behind "if" and its like.

    ``start``: where in the clean text the pattern was found. ``sample``: how the line looks where a process fails of it.

    >>> sample = "RuntimeError: CUDA error: invalid device ordinal"
    >>> is_quoted("how do I mend RuntimeError: CUDA error: invalid device ordinal", 14, sample)
    True
    >>> is_quoted("the worker failed: RuntimeError: CUDA error: invalid device ordinal", 18, sample), is_quoted(sample, 0, sample)
    (False, False)
    >>> sample = "nvcc fatal   : Unsupported gpu architecture 'compute_90'"
    >>> for text in (f'--retry N  try again after "{sample}"', f"+ grep '{sample}' x", f'{{"message": "{sample}"', sample):
    ...     print(is_quoted(text, text.index("Unsupported"), sample, "Unsupported gpu"))
    True
    True
    False
    False
    """
    if FIRST_HAND.match(text):
        return False
    if EXCEPTION_LINE.match(sample) and not EXCEPTION_LINE.match(text):
        before = NAMED.split(HEADER.sub("", text[:start][-300:]))[0]
        if len(WORD.findall(before)) > 1 and not BLAMES.search(before.rstrip().removesuffix(":")):
            return True
    return _is_mentioned(text[:start][-300:], sample, pattern)


def _is_mentioned(before: str, sample: str, pattern: str) -> bool:
    """Whether a line only mentions something. ``before``: what of it stands before the match of the pattern."""
    if not (SHOWN.match(before) or OPENING.search(f"{before}x") or PROSE.search(before)):
        return False
    found = re.search(pattern, sample)
    own = sample[: found.start()] if found else ""
    same = 0
    while same < min(len(before), len(own)) and before[-same - 1] == own[-same - 1]:
        same += 1
    return only_mentions(before[: len(before) - same]) and not only_mentions(own)


def only_mentions(before: str) -> bool:
    """Whether what stands before the words of an error only mentions them."""
    if SHOWN.match(before):
        return True
    opening = [found for found in OPENING.finditer(f"{before}x") if found[1] not in before[found.end() :]]
    if opening and WORD.search(said := before[: opening[0].end()]):
        return not BLAMES.search(said) and not KEY_OF_AN_ERROR.search(said)
    return bool(PROSE.search(before)) and len(WORD.findall(before)) > 1 and not BLAMES.search(before)


# A log whose every line a logger passed on with a level in front, as schedulers of tasks do: what it passes on is no warning.


LEVEL = r"^.{0,80}?\b(?:INFO|WARNING|WARN|DEBUG|ERROR)"
FRAME = re.compile(
    LEVEL + r"(?P<between>[^\w\"]{1,6}(?:[\w.-]{1,40}[\]:|-]{1,2} ?)?) {2}File \"[^\"]{1,300}\", line \d{1,7}, in "
)


@dataclass
class Relayed:
    """What stands in front of all lines, once a frame of a traceback was seen behind it."""

    head: re.Pattern[str] | None = None

    def learn(self, raw: bytes) -> bool:
        """Whether this line is the first one to show it.

        >>> relayed = Relayed()
        >>> relayed.learn(b'[2026-11-22, 10:00:07 UTC] {run.py:93} INFO -   File "/w/a.py", line 7, in main')
        True
        >>> relayed.strip("{run.py:93} INFO - KeyError: 'labels'"), relayed.strip("KeyError: 'labels'")
        ("KeyError: 'labels'", "KeyError: 'labels'")
        """
        if self.head is not None or b'File "' not in raw:
            return False
        if found := FRAME.match(raw.decode("utf-8", "replace").strip("\r\n")):
            self.head = re.compile(LEVEL + re.escape(found["between"]))
        return found is not None

    def strip(self, text: str) -> str:
        """A text without it."""
        return self.head.sub("", text, count=1).lstrip() if self.head else text

    def is_warning(self, raw: bytes) -> bool:
        """Whether a line is a warning or a notice of the program itself."""
        return self.head is None and is_said(raw)
