"""The lines of any log: unfolded from JSON records, cleaned, each with its process, and whether it only mentions an error."""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from dsdoctor.rules.store import form, form_in_bytes, forms

# Raw lines of any log -> clean text: no colours, no progress bars, no prefixes of ranks, containers or clocks.
LONGEST = 4000
"""Longer lines keep their head and their tail: a compiler names the file at the head, an exception stands at the tail."""

SEGMENTS = 8  # how many states of a progress bar are looked at, counted from the end
QUOTES = str.maketrans(dict.fromkeys("‘’‚‛“”„«»‹›「」", "'"))
"""The quotes of all languages become the plain one, which patterns use."""

CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]"
)

COLOUR = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\[\d{1,3}(?:;\d{1,3}){0,4}m")

BARE_COLOUR = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")

PREFIX = form("lines", "prefix")


def is_coloured(raw: bytes) -> bool:
    """Whether a line may have colour codes, which would join with the words beside them."""
    return b"\x1b" in raw or b"[0m" in raw


def raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, each cut to head and tail, in bounded memory whatever the file holds."""
    chunk = 1 << 16
    while line := stream.readline(chunk):
        tail = line
        while not tail.endswith(b"\n") and (more := stream.readline(chunk)):
            tail = tail[-LONGEST:] + more
        yield line if tail is line else line[:LONGEST] + b" " + tail[-LONGEST:]


def shorten(raw: bytes) -> bytes:
    """Head and tail of an overlong line.

    >>> len(shorten(b"x" * 100_000)) <= LONGEST
    True
    """
    return raw if len(raw) <= LONGEST else raw[: LONGEST * 3 // 4 - 1] + b" " + raw[-LONGEST // 4 :]


def segments(raw: bytes) -> list[str]:
    r"""The clean texts of a line: several where carriage returns overwrote it.

    >>> segments(b"[rank1]: \x1b[31mRuntimeError: no\x1b[0m\n")
    ['RuntimeError: no']
    >>> segments(b" 10%|#\r 20%|##\rdone\r\n")
    ['10%|#', '20%|##', 'done']
    """
    text = raw.replace(b"\0", b"").decode("utf-8", "replace")
    return [clean(part) for part in text.strip("\r\n").split("\r")[-SEGMENTS:] if part.strip()]


def last_segment(raw: bytes) -> str:
    """What of a line is on the screen in the end."""
    return (segments(raw) or [""])[-1]


def clean(text: str) -> str:
    """One text without colours and prefixes.

    >>> clean("#12 3.456   2026-11-21T08:50:53.123Z node1: Traceback (most recent call last):")
    'Traceback (most recent call last):'
    >>> clean("15:47:04 gpu-node-07 AssertionError"), clean("15:47:04 workstation   import torch")
    ('AssertionError', 'import torch')
    >>> clean("15:47:04 loss 2.5"), clean("2026-11-21 08:50:53,123 trainer loss=2")
    ('loss 2.5', 'trainer loss=2')
    >>> clean(" [93m [WARNING] [0m async_io requires libaio")
    '[WARNING]  async_io requires libaio'
    """
    if not text.isprintable():
        text = CONTROL.sub("", text)
    if "[" in text:
        text = BARE_COLOUR.sub("", text)
    text = text.lstrip()
    for _ in range(6):
        found = PREFIX.match(text)
        if not found or not found.end():
            break
        text = text[found.end() :].lstrip()
    text = text.rstrip()
    return text if text.isascii() else text.translate(QUOTES)


KEYS = forms("lines")["keys"]
TEXTS, TRACES, INSIDE, PROGRESS = KEYS["texts"], KEYS["traces"], KEYS["inside"], KEYS["progress"]
RANKS, LOCAL_RANKS, PODS, PLACES = KEYS["ranks"], KEYS["local_ranks"], KEYS["pods"], KEYS["places"]
LEVELS, LEVEL_WORDS, TIMES = KEYS["levels"], frozenset(KEYS["level_words"]), KEYS["times"]

WRITERS = frozenset({*PODS, "container", "container_name", "logstreamname", "stream", "logger"})
"""With one of these, or a level, beside its text an object is a record of a log."""

TIMES_OF_LINES = tuple(name for name in TIMES if name not in {"date", "created"})
"""Changes, letters and rows of a table have a date, too."""

WITH_A_TIME = frozenset({"msg", "message", "log", "textpayload"})
"""Texts of a log beside which a time or a rank is enough: the others are those of data sets as well, with times and ranks."""

WITH_A_HOST = WITH_A_TIME | {"event", "line"}

A_TRACEBACK = "\nTraceback ("

MAX_FRONT_BYTES, MAX_DEPTH, MAX_BLANK_LINES, MAX_FOLDED = 200, 2, 8, 1_000_000
"""How much may stand before a record, how often one is in another, how many blank lines may be between the first two, and of
how many records with several lines the place is remembered."""


class Line(NamedTuple):
    """A clean line and its number in the log."""

    number: int
    text: str


class JsonLines:
    """The lines of a log, unfolded where it is made of records: where two follow each other, or it is one record only."""

    def __init__(self) -> None:
        self.made_of_records = False
        self._given = 0
        self._ends, self._surplus = array("Q"), array("Q")

    def unfold(self, lines: Iterable[bytes | str]) -> Iterator[bytes]:
        r"""All lines in order.

        >>> log = [b'{"log":"a\\nb\\n","stream":"stderr"}\n', b'{"log":"c\\n","stream":"stderr"}\n', b"d"]
        >>> records = JsonLines()
        >>> list(records.unfold(log)), [records.line_of_file(number) for number in (1, 2, 3, 4)]
        ([b'a', b'b', b'c', b'd'], [1, 1, 2, 3])
        """
        waiting: list[bytes] = []
        count = 0
        for line in lines:
            count += 1
            raw = line if isinstance(line, bytes) else line.encode("utf-8", "replace")
            if b"}" not in raw[-4:] and not waiting:  # why: most lines of most logs
                self._given += 1
                yield raw
                continue
            record = lines_in(raw)
            if self.made_of_records:
                yield from self._give(record or (without_sample(raw),))
            elif record and waiting:
                self.made_of_records = True
                yield from (part for held in (*waiting, raw) for part in self._give(lines_in(held) or (held,)))
                waiting = []
            elif record or (waiting and len(waiting) <= MAX_BLANK_LINES and not raw.strip()):
                waiting.append(raw)
            else:
                yield from (part for held in (*waiting, raw) for part in self._alone(held))
                waiting = []
        self.made_of_records = self.made_of_records or (bool(waiting) and count == len(waiting))
        for held in waiting:
            yield from self._give(lines_in(held) or (held,)) if self.made_of_records else self._alone(held)

    def _alone(self, raw: bytes) -> tuple[bytes, ...]:
        """A line of a log that is not made of records."""
        return self._give((is_certain(raw) and lines_in(raw)) or (without_sample(raw),))

    def _give(self, lines: tuple[bytes, ...]) -> tuple[bytes, ...]:
        self._given += len(lines)
        if len(lines) > 1 and len(self._ends) < MAX_FOLDED:
            self._ends.append(self._given)
            self._surplus.append(len(lines) - 1 + (self._surplus[-1] if self._surplus else 0))
        return lines

    @property
    def has_several(self) -> bool:
        """Whether one line of the file held several."""
        return bool(self._ends)

    def line_of_file(self, number: int) -> int:
        """On which line of the file the given line stands."""
        before = bisect_left(self._ends, number)
        surplus = self._surplus[before - 1] if before else 0
        if before == len(self._ends):
            return number - surplus
        # the first line of the next record with several lines; it may be past this one
        first = self._ends[before] - (self._surplus[before] - surplus)
        return min(number, first) - surplus


def lines_in(raw: bytes, depth: int = MAX_DEPTH) -> tuple[bytes, ...] | None:
    r"""The lines of text of a record, None where a line is no record.

    >>> lines_in(b'{"ts": 1, "rank": 6, "pod": "asr-1", "msg": "Traceback:\\n  x"}')
    (b'[pod/asr-1] [rank6]: Traceback:', b'[pod/asr-1] [rank6]:   x')
    >>> lines_in(b'2026-11-22T10:00:07Z {"log":"step 1\\n","stream":"stdout"}\n'), lines_in(b'{"message": "no label"}')
    ((b'2026-11-22T10:00:07Z step 1',), None)
    """
    if b"}" not in raw[-4:] or (start := raw.find(b'{"', 0, MAX_FRONT_BYTES)) < 0:
        return None
    front = raw[:start]
    if start and clean(front.decode("utf-8", "replace") + "x") != "x":
        return None
    try:
        record = msgspec.json.decode(raw[start:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    keys = _flat(record)
    text = _first_text(keys, TEXTS)
    if text is None or not _is_of_a_log(keys):
        return None
    label = front + _label_of(keys)
    inner = lines_in(text.strip().encode("utf-8", "replace"), depth - 1) if depth and text.startswith("{") else None
    if inner:
        return tuple(label + line for line in inner)
    level = _told_level(keys)
    if level == "WARNING" and " NCCL " not in text[:120]:
        text = f"[WARNING] {text.partition(A_TRACEBACK)[0]}"
    whole = _with_progress(text.rstrip(), keys)
    for trace in TRACES:
        # why: what a logger adds to a warning or a notice was borne, and of its lines nothing would say so
        if not level and isinstance(more := keys.get(trace), str) and more not in text:
            whole = f"{whole}\n{more.rstrip()}"
    return tuple(label + line.encode("utf-8", "replace") if line else b"" for line in whole.split("\n"))


def _flat(record: Any) -> dict[str, Any]:
    """The keys of a record and of the objects of labels in it, in one way of writing; its own ones first."""
    flat: dict[str, Any] = {}
    within = [record]
    for one in within:
        if not isinstance(one, dict):
            continue
        named = {key.lower().lstrip("_@").translate(PLAIN): value for key, value in one.items()}
        within += [named[name] for name in INSIDE if name in named]
        for name, value in named.items():
            flat.setdefault(name, value.get("name") if isinstance(value, dict) and name in PLACES else value)
    return flat


PLAIN = str.maketrans({".": "_", "-": "_", " ": "_"})


def _first_text(keys: dict[str, Any], names: Iterable[str]) -> str | None:
    return next((keys[name] for name in names if isinstance(keys.get(name), str)), None)


def _label_of(keys: dict[str, Any]) -> bytes:
    """As torchrun and Kubernetes label their lines."""
    place = _first_text(keys, PLACES) or ""
    host = f"[pod/{place}] " if place[:1].isalpha() and place.replace("-", "").replace(".", "").isalnum() else ""
    rank, local = _number(keys, RANKS), _number(keys, LOCAL_RANKS)
    numbered = f"[rank{rank}]: " if rank else f"[default{local}]: " if local else ""
    return f"{host[:80]}{numbered}".encode() if host or numbered else b""


def _number(keys: dict[str, Any], names: Iterable[str]) -> str:
    found = (str(keys[name]) for name in names if type(keys.get(name)) in {int, str})
    return next((number for number in found if number.isdecimal() and len(number) <= 5), "")


def _is_of_a_log(keys: dict[str, Any]) -> bool:
    """Whether an object is a record of a log, and no sample of a data set that is printed."""
    name = next(name for name in TEXTS if isinstance(keys.get(name), str))
    if not WRITERS.isdisjoint(keys) or _has_level(keys) or isinstance(keys.get("record"), dict):
        return True
    if name in WITH_A_HOST and not keys.keys().isdisjoint(PLACES):
        return True
    times = TIMES if name == "log" else TIMES_OF_LINES
    return name in WITH_A_TIME and not keys.keys().isdisjoint((*times, *RANKS, *LOCAL_RANKS))


def _has_level(keys: dict[str, Any]) -> bool:
    levels = [keys[name] for name in LEVELS if name in keys]
    return any(type(one) is int or (isinstance(one, str) and one.lower() in LEVEL_WORDS) for one in levels)


def is_certain(raw: bytes) -> bool:
    r"""Whether a record is known by itself, among lines of another kind: docker's, or one of a logger with a traceback.

    >>> is_certain(b'{"log":"RuntimeError: no\\n","stream":"stderr"}'), is_certain(b'{"level":"error","msg":"RuntimeError: no"}')
    (True, False)
    """
    if b"stream" not in raw and b"Traceback" not in raw:
        return False
    try:
        keys = _flat(msgspec.json.decode(raw[max(0, raw.find(b'{"', 0, MAX_FRONT_BYTES)) :]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if isinstance(keys.get("log"), str) and keys.get("stream") in {"stdout", "stderr"}:
        return True
    traces = [keys[name] for name in TRACES if isinstance(keys.get(name), str)]
    return (_has_level(keys) or "logger" in keys) and any(one.startswith("Traceback (") for one in traces)


def without_sample(raw: bytes) -> bytes:
    """A printed sample of a data set without its text, which may quote anything; any other line as it is.

    >>> without_sample(b'{"text": "Killed", "url": "https://a.example"}'), without_sample(b'{"text": "Killed", "level": "info"}')
    (b'{"text": ...}', b'{"text": "Killed", "level": "info"}')
    """
    if not raw.startswith(b"{") or not any(name in raw for name in (b'"text"', b'"body"')):
        return raw
    try:
        keys = _flat(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    name = next((name for name in TEXTS if isinstance(keys.get(name), str)), "")
    return f'{{"{name}": ...}}'.encode() if name in {"text", "body"} and not _is_of_a_log(keys) else raw


def _told_level(keys: dict[str, Any]) -> str:
    """The level of what is no failure; "" of an error, and where a record has none.

    Containers know nothing of what a program prints, and call all of it info: only a warning says something of a message.
    """
    level = (_first_text(keys, LEVELS) or "").lower()
    return next((name for name in ("WARNING", "INFO", "DEBUG") if level.startswith(name[:4].lower())), "")


def _with_progress(text: str, keys: dict[str, Any]) -> str:
    """A message with the figures of a step that stand beside it."""
    figures = [(name, keys[name]) for name in PROGRESS if type(keys.get(name)) in {int, float}]
    return text if "\n" in text or not figures else " ".join([text, *(f"{name}={value}" for name, value in figures)])


# What a process says when it fails: its own exception or crash, or only that another one is gone.
EXCEPTION_LINE = form("lines", "exception")

MAX_LEVEL_BYTES = 260  # a level or the name of a warning stands within so many bytes of the line's head
SAID = form_in_bytes("lines", "said")


def is_said(raw: bytes) -> bool:
    """Whether a line is a warning or a notice.

    >>> is_said(b"[rank2]: [2026-11-22 10:00:07,123] [WARNING] [x.py:7:f] no nvcc"), is_said(b"/v/x.py:3: UserWarning: no nvcc")
    (True, True)
    >>> is_said(b"W1122 10:00:07.117000 412 torch/x.py:12] no nvcc"), is_said(b"n1:7:9 [0] NCCL WARN Duplicate GPU detected")
    (True, False)
    """
    head = raw.rstrip(b"\r\n").rpartition(b"\r")[2][:MAX_LEVEL_BYTES]
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


BLAMES, KEY_OF_AN_ERROR, PROSE = (form("lines", name) for name in ("blames", "key-of-an-error", "mentions-prose"))
SOURCE, PROMPT = form("lines", "source"), form("lines", "prompt")

FIRST_HAND = re.compile(r"\[[^\]]{0,100}\.(?:cpp|cc|cu|h):\d|\S{1,80} \[\d{1,3}\] NCCL |\S{1,80}\.(?:cpp|cc|cu|h):\d")
"""What torch's C++ and NCCL write of themselves."""

HEADER = re.compile(r"^(?:\[[^\]]{0,120}\] ?){1,4}")

NAMED = re.compile(r"\b[\w.]{0,80}(?:Error|Exception): ")

WORD = re.compile(r"[^\W\d_]{2,}")  # two words and more stand before an error where it is quoted
SHOWN = re.compile(
    r"\++ [a-z./]|(?:Collecting|Downloading|Using cached|Requirement already satisfied|Obtaining|Processing):? "
)
"""How a shell shows the command that it runs next (set -x), and how pip names what it takes."""

OPENING = re.compile(r"(?:^|[\s(\[{=:,])([\"'`])(?=[\w/.])")


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
