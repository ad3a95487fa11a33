"""Raw lines of any log -> clean text: no colours, no progress bars, no prefixes of ranks, containers or clocks."""

import re
from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 4000
"""Longer lines keep their head and their tail: a compiler names the file at the head, an exception stands at the tail."""

SEGMENTS = 8
"""How many states of a progress bar are looked at, counted from the end."""

NO_LOGS = (b"\x89PNG", b"PK\x03\x04", b"\x7fELF", b"%PDF", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"\x80\x02")
"""How pictures, archives, programs and pickles begin."""

CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\v\f\b\a\x1b")
MOSTLY = 0.97
"""What share of a log's bytes is no control character."""

QUOTES = str.maketrans(dict.fromkeys("‘’‚‛“”„«»‹›「」", "'"))
"""The quotes of all languages become the plain one, which patterns use."""

CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]"
)
COLOUR = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\[\d{1,3}(?:;\d{1,3}){0,4}m")
BARE_COLOUR = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")
CLOCK = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
HOSTED = (  # a host's name behind the clock: one with a number or hyphen, any before what no other word stands before
    r"(?:(?=[a-z][\w.]{0,60}[-\d])[a-z][\w.-]{1,60} (?![=:])"
    r"|[a-z][\w.-]{1,60} (?=\[|Traceback \(|File \"|\s|\w{1,60}(?:Error|Exception)\b))"
)
PREFIX = re.compile(
    r"(?:"
    rf"\[?(?:{CLOCK}|\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?)\]? {HOSTED}"
    "|"
    r"\[(?:rank|default|Rank )\d{1,5}\]\s?:\s?|(?:rank|default)\d{1,5}: "  # torchrun, elastic, torch's own
    r"|\[\d{1,5}\]\s?:\s?|\[\d+,\d+\]<std(?:out|err)>\s?:?"  # mpirun --tag-output
    r"|\d{1,5}: (?=\D|\[?\d{4}[-/]\d\d[-/]|\d\d:\d\d:\d\d|\d{1,3} validation error)"  # srun --label
    r"|#\d{1,4} \d+\.\d+ |#\d{1,4} (?=\S)"  # docker build
    rf"|\[?{CLOCK}\]?[,:]? ?"  # CI, logging
    r"|\[\d\d:\d\d:\d\d(?:[.,]\d+)?\] ?|\d\d:\d\d:\d\d(?:[.,]\d{1,9})? "
    r"|\| (?:ERROR|WARNING|INFO|DEBUG|CRITICAL) {0,5}\| \S{1,120} - "  # loguru
    r"|\[pod/[\w./-]{1,120}\] |\[[A-Za-z][\w.-]{0,40}[-_:]\d{1,9}\] |\d{1,3}(?:\.\d{1,3}){3}: "  # pods, hosts
    r"|(?!cc1|collect2|gcc|clang|python|pip|x86_64|aarch64|line|sm_"
    r"|lib[\w.-]{1,40}\.so|[\w.]{1,80}(?:Error|Exception|Warning|Exit): )(?=[\w.-]{0,40}\d)[A-Za-z][\w.-]{0,40}: (?=\S|\s{2})"
    r"|(?![\w.]{0,60}(?:Error|Exception|Failed|Failure): |(?i:warning|note|hint|tip|info): )[A-Za-z][\w.-]{0,40}: "  # pdsh
    r"(?=\s{0,20}(?:\[rank\d|Traceback \(|File \"|\[\d{4}-|\w{1,60}(?:Error|Exception): ))"
    r"|(?:stdout|stderr) [FP] |(?:stdout|stderr) ?[:|] "  # containers' own logs
    r"|\((?:\w{1,60} )?pid=\d{1,9}(?:, ip=[\w.:]{3,40})?\) "  # Ray
    r"|[A-Za-z][\w.-]{0,40}[-_]\d{1,4} {1,20}\| "  # docker compose
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,60} [\w.-]{1,40}\[\d{1,9}\]: "  # journal
    r"|\#\#\[error\]|(?:> ?){1,4}(?=\S)|E {2,12}(?=\S)"  # GitHub, mail, pytest
    r"|│ ?(?=\S)|[│|] ?(?=\s{2,}|\w+Error)"  # boxes
    r")"
)


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


def is_text(sample: bytes) -> bool:
    """Whether the first bytes of a file may be those of a log: in any encoding, with colours and zeros.

    >>> is_text("Getötet".encode("latin-1")), is_text("a log".encode("utf-16")), is_text(bytes(range(256)))
    (True, True, False)
    """
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    if sample.startswith(NO_LOGS):
        return False
    letters = sample.replace(b"\0", b"")
    return len(letters.translate(None, CONTROLS)) >= len(letters) * MOSTLY


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
