"""The names in an error, and in what mends it -> the lines above it in the same log that set them: the command, a configuration, a
variable, or a warning that named them before.

Evidence only: nothing is decided by it. A name counts if it has the form of a setting, so that words of a sentence lead nowhere.
"""

import re
from collections.abc import Iterator

from dsdoctor.diagnosis.lines import Line, last_segment
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import FINITE, FRAME, STEP

MAX_LINKS = 3
MAX_LINE = 20_000  # so many bytes of a command or a printed configuration are looked at

NAME = re.compile(r"--?[A-Za-z]\w*(?:[-.]\w+)+|--[A-Za-z]\w{3,60}|(?<![\w/])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+")
"""A name that has the form of an option, a setting or a variable: ``--tensor-parallel-size``, ``MASTER_PORT``."""

OPTION = re.compile(
    r"(?:^|[\s'\"])--(?P<name>[A-Za-z][\w.-]{1,90})(?:['\"], ['\"]|[ =]{1,2}['\"]?)(?P<value>(?!-)[^\s,;'\"`)}\]]{1,80})"
)

ASSIGNED = re.compile(
    r"(?:^|[\s'\"{(,;|+])(?P<name>[A-Za-z][\w.-]{2,90})['\"]?(?:=['\"]?|: (?=\d|True|False|true|false|None|null|['\"/~]))"
    r"(?P<value>['\"]?[\w./^+@%-][^\s,;'\"`)}\]]{0,80})"
)

MEASURED = re.compile(r"(?:^|_)(?:loss|reward|norm|mean|acc|time)(?:_|$)")
"""Parts of names of what a training measures; with a figure it is no setting."""

QUOTES = "'\""
A_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b[Ww]arning:|UserWarning")
SECRET = re.compile(r"(?i)key|token|secret|passw|auth")
TOO_COMMON = frozenset(
    {"local_rank", "global_rank", "world_size", "node_rank", "global_step", "error_code", "file_name"}
)


def links(read: Scan, before: int, words: str, mends: str = "") -> tuple[str, ...]:
    """The evidence. ``before``: the line of the error; ``words``: its own; ``mends``: those of its fix."""
    named, asked, sentence = names_in(words), names_in(mends), f" {' '.join(re.findall(r'[a-z0-9_]+', words.lower()))} "
    found: dict[str, str] = {}
    warned = ""
    for line in _lines_above(read, before):
        of_line = [*OPTION.finditer(line.text), *ASSIGNED.finditer(line.text)]
        for one in of_line:
            key = _plain(one["name"])
            if key in found or key in TOO_COMMON or SECRET.search(key) or MEASURED.search(key):
                continue
            if key in named or key in asked or _is_phrase(key, sentence):
                found[key] = f"set above, in line {line.number}: {one['name']}={one['value'].strip(QUOTES)}"
        if not of_line and not warned and A_WARNING.search(line.text) and named & names_in(line.text):
            warned = f"warned of above, in line {line.number}: {line.text[:300]}"
    told = sorted(found, key=lambda key: key not in named)[:MAX_LINKS]
    return (*(found[key] for key in told), *((warned,) if warned else ()))


def names_in(text: str) -> set[str]:
    """The names of settings in a text, written alike.

    >>> sorted(names_in("--tensor-parallel-size must divide num_heads (28); set MASTER_PORT, not the port"))
    ['master_port', 'num_heads', 'tensor_parallel_size']
    """
    return {_plain(found) for found in NAME.findall(text)} - TOO_COMMON


def _plain(name: str) -> str:
    """A name without its dashes and the sections that it is in."""
    return name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()


def _is_phrase(key: str, sentence: str) -> bool:
    """Whether the words of a name stand one after the other in a sentence: "tensor parallel size" is tensor_parallel_size."""
    parts = [part for part in key.split("_") if part not in {"num", "n", "the"}]
    return len(parts) > 1 and f" {' '.join(parts)} " in sentence


def _lines_above(read: Scan, before: int) -> Iterator[Line]:
    """The first lines of a log and those just above its error, without steps, source and frames."""
    recent, last = read.timeline.recent, read.lines
    first_recent = last - len(recent) + 1
    raws = [(number, raw) for number, raw in enumerate(read.timeline.head, 1) if number < first_recent]
    raws += enumerate(recent, first_recent)
    source = 0  # the line of source below a frame
    for number, raw in raws:
        if number >= before:
            return
        raw = raw[:MAX_LINE]
        if b"=" not in raw and b":" not in raw and b"--" not in raw:
            continue
        if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]):
            continue
        text = last_segment(raw)
        if FRAME.match(text):
            source = number + 1
        elif number != source:
            yield Line(number, text)
