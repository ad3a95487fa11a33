"""Raw lines of any log -> clean text, and which process wrote each."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

# Raw lines of any log -> clean text: no colours, no progress bars, no prefixes of ranks, containers or clocks.


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


# A raw line of a log -> which process wrote it, as far as its prefix says. Reads only the head of the line.


HEAD = 240
COLOUR_OF_HEAD = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
RANK = re.compile(rb"\[(?:rank ?|Rank )(\d{1,5})\]|(?:^|[\]:|] ?)rank(\d{1,5}): ")
LOCAL = re.compile(rb"\[default(\d{1,5})\]:?|^default(\d{1,5}): ")
MPI = re.compile(rb"^\[\d{1,5},(\d{1,5})\]<std(?:out|err)>")
TASK = re.compile(rb"^ {0,4}(\d{1,5}): ")
RAY = re.compile(rb"^\(((?:\w{1,60} )?pid=\d{1,9}(?:, ip=[\w.:]{3,40})?)\) ")
HOST = re.compile(rb"^(?:\[(?:pod/)?([A-Za-z][\w./-]{0,80})\] |([A-Za-z][\w.-]{0,60}\d[\w.-]{0,20})(?: \| |: ))")


@dataclass(frozen=True)
class Speaker:
    """A process that writes to a log: its rank, its number on its node or in its Slurm step, its host; None where unknown."""

    rank: int | None = None
    local: int | None = None
    task: int | None = None
    host: str = ""

    @property
    def number(self) -> int | None:
        """The rank, or what stands for it where nothing else is known."""
        numbers = (self.rank, self.task, self.local)
        return next((number for number in numbers if number is not None), None)


NOBODY = Speaker()


def speaker_of(raw: bytes, *, tasks: bool = False) -> Speaker:
    """Who wrote a line. ``tasks``: a number at the head is that of a Slurm task.

    >>> speaker_of(b"[default1]:[rank5]: Traceback (most recent call last):").rank
    5
    >>> speaker_of(b"node-2: [rank7]: x").host, speaker_of(b"3: step 1", tasks=True).task, speaker_of(b"3: step 1").number
    ('node-2', 3, None)
    """
    head = raw[:HEAD]
    if b"\x1b" in head:
        head = COLOUR_OF_HEAD.sub(b"", head)
    rank, local, task = RANK.search(head), LOCAL.search(head), (TASK.match(head) if tasks else None)
    if rank is None:
        rank = MPI.match(head)
    host = HOST.match(head) or RAY.match(head)
    return Speaker(
        rank=_number(rank),
        local=_number(local),
        task=_number(task),
        host=next((part for part in host.groups() if part), b"").decode() if host else "",
    )


def same_process(one: Speaker, other: Speaker) -> bool:
    """Whether two lines may be of one process: no number that both have differs.

    >>> same_process(Speaker(local=1), Speaker(rank=1, local=1)), same_process(Speaker(rank=1), Speaker(rank=2))
    (True, False)
    """
    if one.rank is not None and other.rank is not None:
        return one.rank == other.rank
    if one.task is not None and other.task is not None:
        return one.task == other.task
    if one.host and other.host and one.host != other.host:
        return False
    return one.number == other.number


def are_two(one: Speaker, other: Speaker) -> bool:
    """Whether two lines are surely of two processes: both are numbered, and not alike.

    >>> are_two(Speaker(rank=1), Speaker(rank=2)), are_two(Speaker(rank=1), Speaker())
    (True, False)
    """
    return one.number is not None and other.number is not None and not same_process(one, other)


def _number(found: re.Match[bytes] | None) -> int | None:
    return next(int(group) for group in found.groups() if group) if found else None


# The line of an exception that a terminal or a box wrapped over several lines -> that line as it was.


MOST, MOST_CUT, BETWEEN = 3, 8, 40
"""Over how many more lines it may go: wrapped between words, and cut where the lines were full; how many may stand between."""

WHOLE, LINE = 1000, 400
"""How long such an exception may be, and each of its lines."""

ANOTHER_PROGRAM = re.compile(
    r"(?:slurmstepd|slurmd|srun|sbatch|salloc|scancel|mpirun|mpiexec|mpiexec\.hydra|prterun|prted|orterun|orted|kubelet|kernel)"
    r"(?:\[\d{1,9}\])?: |\*\*\* SIG[A-Z]{3,6} received "
)
"""How lines of launchers and schedulers begin: they end what a rank said before."""

WIDTHS = frozenset({72, 80, 100, 120, 132, 160, 200})
"""What terminals and pages cut lines at, in the middle of words."""


class WrappedLine:
    """The line of an exception with those after it, joined; ``text`` is "" where nothing more can belong to it, and
    ``since`` the number of its first line.

    ``cut``: one of its lines is as long as a terminal is wide, so what is known of it may be of its half. ``uncut``: all that was
    put together where lines were full.
    """

    def __init__(self) -> None:
        self.text = self.uncut = self._spaced = ""
        self._raw, self._head, self.since, self._joined = b"", 0, 0, 0
        self._speaker = NOBODY
        self.cut = False

    def begin(self, text: str, raw: bytes, line: int, speaker: Speaker = NOBODY) -> None:
        """An exception's line. ``raw`` is it with what stands before the clean text: a label, a clock."""
        self.text = self._spaced = text if len(text) <= WHOLE else ""
        self._raw = raw.rstrip(b"\r\n")
        self._head = max(0, self._raw.find(text[:20].encode("utf-8", "replace")))
        self._speaker, self.since, self._joined, self.uncut = speaker, line, 0, ""
        self.cut = self._is_full(self._raw)

    def joined(self, text: str, raw: bytes, line: int, speaker: Speaker = NOBODY) -> tuple[str, ...]:
        """The line together with the next one, in the two ways that it may go on where the line before was full; nothing
        where that one is too long to be a part of it, or of another process."""
        if speaker.number is not None and speaker.number != self._speaker.number:
            self.text = "" if line - self.since > BETWEEN else self.text
            return ()
        if ANOTHER_PROGRAM.match(text):
            self.text = ""
            return ()
        raw = raw.rstrip(b"\r\n")
        cut = self._cuts_words(raw)
        self.cut = self.cut or self._is_full(raw)
        whole, spaced = f"{self.text}{'' if cut else ' '}{text}", f"{self._spaced} {text}"
        self.uncut = whole if cut and (self.uncut or not self._joined) else ""
        self._joined += 1
        ended = self._joined >= (MOST_CUT if self.cut else MOST) or len(text) > LINE or len(whole) > WHOLE
        self.text, self._spaced, self._raw = "" if ended else whole, spaced, raw
        return () if len(text) > LINE else tuple(dict.fromkeys((whole, spaced)))

    @property
    def goes_on(self) -> bool:
        """Whether the last line of it was full, so that its end is still to come."""
        return self._is_full(self._raw)

    def _is_full(self, raw: bytes) -> bool:
        """Whether a line is as long as a terminal is wide, with its label or before the label was put in front."""
        return len(raw) in WIDTHS or len(raw) - self._head in WIDTHS

    def _cuts_words(self, raw: bytes) -> bool:
        """Whether the line before was cut where it was full, and not between words."""
        body = raw[self._head :] if raw[: self._head].endswith(self._raw[: self._head][-2:]) else raw
        return self._is_full(self._raw) and not self._raw.endswith(b" ") and not body.startswith(b" ")


# The lines just above a line, and whether a pattern is in them. No line is searched twice for one pattern.


ABOVE, CONTEXT = 40, 300
"""How many lines above a line are remembered, and how much of each."""


@dataclass
class Above:
    """The last lines of a log that are not blank."""

    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=ABOVE))
    count: int = 0
    searched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each pattern: up to which line it was searched, and the last line that has it; counted from 1."""

    def remember(self, raws: Iterable[bytes]) -> None:
        """Take the next lines."""
        for raw in raws:
            self.lines.append(raw[:CONTEXT])
            self.count += 1

    def has(self, pattern: str) -> bool:
        """Whether one of the lines has the pattern.

        >>> above = Above()
        >>> above.remember([b'File "setup.py"', b"  import torch"])
        >>> above.has(r"setup\\.py"), above.has("metadata")
        (True, False)
        """
        until, last = self.searched.get(pattern, (0, 0))
        new = islice(reversed(self.lines), min(self.count - until, len(self.lines)))
        found = (self.count - age for age, raw in enumerate(new) if re.search(pattern, raw.decode("utf-8", "replace")))
        last = next(found, last)
        self.searched[pattern] = self.count, last
        return last > self.count - ABOVE and last > 0
