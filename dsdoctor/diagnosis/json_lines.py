"""Lines that are JSON records of a logger or a container -> the lines of text in them, with the label of who wrote them.

Loki, CloudWatch, docker, fluentd, Kubernetes and structlog put each line, or each message of several lines, into an object.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from dsdoctor.diagnosis.lines import clean

TEXTS = ("msg", "message", "log", "event", "text", "body", "line", "textpayload")
TRACES = ("exception", "exc_info", "exc_text", "traceback", "stack_trace", "stacktrace", "error_stack_trace", "error")
"""Under which keys a logger puts what belongs behind the message."""

RANKS = ("rank", "global_rank", "rank_id")
LOCAL_RANKS = ("local_rank",)
PODS = ("pod", "pod_name", "kubernetes_pod_name", "k8s_pod_name")
PLACES = (*PODS, "host", "hostname", "host_name", "node", "node_name", "container", "container_name", "logstreamname")
LEVELS = ("level", "levelname", "lvl", "severity", "severitytext", "loglevel", "log_level")
TIMES = ("time", "ts", "timestamp", "asctime", "date", "datetime", "created", "eventtime", "realtime_timestamp")
LEVEL_WORDS = frozenset(
    [
        "trace",
        "debug",
        "info",
        "information",
        "notice",
        "warn",
        "warning",
        "error",
        "err",
        "critical",
        "crit",
        "fatal",
        "alert",
        "emergency",
        "panic",
        "exception",
    ]
)
WRITERS = frozenset({*PODS, "container", "container_name", "logstreamname", "stream", "logger"})
"""With one of these, or a level, beside its text an object is a record of a log."""

TIMES_OF_LINES = tuple(name for name in TIMES if name not in {"date", "created"})
"""Changes, letters and rows of a table have a date, too."""

WITH_A_TIME = frozenset({"msg", "message", "log", "textpayload"})
"""Texts of a log beside which a time or a rank is enough: the others are those of data sets as well, with times and ranks."""

WITH_A_HOST = WITH_A_TIME | {"event", "line"}

INSIDE = ("kubernetes", "k8s", "labels", "attributes", "resource", "fields", "tags", "extra", "log")
"""Objects within a record in which labels and the level may be."""

A_TRACEBACK = "\nTraceback ("
PROGRESS = ("step", "global_step", "epoch", "loss", "grad_norm", "loss_scale", "lr")
FRONT, DEEPEST, BLANK_LINES, MOST_FOLDED = 200, 2, 8, 1_000_000
"""How much may stand before a record, how often one is in another, how many blank lines may be between the first two, and of
how many records with several lines the place is remembered."""


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
            record = lines_of(raw)
            if self.made_of_records:
                yield from self._give(record or (without_sample(raw),))
            elif record and waiting:
                self.made_of_records = True
                yield from (part for held in (*waiting, raw) for part in self._give(lines_of(held) or (held,)))
                waiting = []
            elif record or (waiting and len(waiting) <= BLANK_LINES and not raw.strip()):
                waiting.append(raw)
            else:
                yield from (part for held in (*waiting, raw) for part in self._alone(held))
                waiting = []
        self.made_of_records = self.made_of_records or (bool(waiting) and count == len(waiting))
        for held in waiting:
            yield from self._give(lines_of(held) or (held,)) if self.made_of_records else self._alone(held)

    def _alone(self, raw: bytes) -> tuple[bytes, ...]:
        """A line of a log that is not made of records."""
        return self._give((is_certain(raw) and lines_of(raw)) or (without_sample(raw),))

    def _give(self, lines: tuple[bytes, ...]) -> tuple[bytes, ...]:
        self._given += len(lines)
        if len(lines) > 1 and len(self._ends) < MOST_FOLDED:
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


def lines_of(raw: bytes, depth: int = DEEPEST) -> tuple[bytes, ...] | None:
    r"""The lines of text of a record, None where a line is no record.

    >>> lines_of(b'{"ts": 1, "rank": 6, "pod": "asr-1", "msg": "Traceback:\\n  x"}')
    (b'[pod/asr-1] [rank6]: Traceback:', b'[pod/asr-1] [rank6]:   x')
    >>> lines_of(b'2026-11-22T10:00:07Z {"log":"step 1\\n","stream":"stdout"}\n'), lines_of(b'{"message": "no label"}')
    ((b'2026-11-22T10:00:07Z step 1',), None)
    """
    if b"}" not in raw[-4:] or (start := raw.find(b'{"', 0, FRONT)) < 0:
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
    label = front + _label(keys)
    inner = lines_of(text.strip().encode("utf-8", "replace"), depth - 1) if depth and text.startswith("{") else None
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


def _first_text(keys: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((keys[name] for name in names if isinstance(keys.get(name), str)), None)


def _label(keys: dict[str, Any]) -> bytes:
    """As torchrun and Kubernetes label their lines."""
    place = _first_text(keys, PLACES) or ""
    host = f"[pod/{place}] " if place[:1].isalpha() and place.replace("-", "").replace(".", "").isalnum() else ""
    rank, local = _number(keys, RANKS), _number(keys, LOCAL_RANKS)
    numbered = f"[rank{rank}]: " if rank else f"[default{local}]: " if local else ""
    return f"{host[:80]}{numbered}".encode() if host or numbered else b""


def _number(keys: dict[str, Any], names: tuple[str, ...]) -> str:
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
        keys = _flat(msgspec.json.decode(raw[max(0, raw.find(b'{"', 0, FRONT)) :]))
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
