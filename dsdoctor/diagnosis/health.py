"""What a log shows of health: an end or progress, errors by their form alone, losses that are no numbers, a log that is cut off.

No rule of the catalogue is asked: a log is healthy where something shows it, and not because nothing is known against it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.diagnosis.lines import PROMPT, SHOWN, Line, is_said, last_segment, segments
from dsdoctor.diagnosis.models import Facts
from dsdoctor.diagnosis.timeline import A_LOGGER, FINITE, FRAME, GOES_ON, STEP, Timeline
from dsdoctor.rules import book
from dsdoctor.rules.store import form, form_in_bytes

HINTS: tuple[bytes, ...] = (
    *(b"rror", b"RROR", b"xception", b"FAILED", b"ABORT", b"atal", b"FATAL", b"CRITICAL", b"panic", b"olution"),
    *(b"solve", b"E0", b"E1", b"F0", b"F1", b"C0", b"C1", b'File "', b"\xc3\x97 ", b"x Failed", b"EI0", b"EJ0"),
    *(b"EZ9", b"EE9", b"EH9", b"what():", b"ERR", b"most recent call"),
)
"""Parts of every error by form, and of places of tracebacks: a batch of lines without them is not looked at."""

IN_WORDS = tuple(dict.fromkeys(hint.lower() for hint in HINTS if hint.isalnum()))
BETWEEN_WORDS = tuple(hint for hint in HINTS if not hint.isalnum())
"""Those that are a part of a word, and the others. A batch has far fewer different words than text."""

MAYBE = form_in_bytes("lines", "maybe-an-error")

PROGRESS_HINTS: tuple[bytes, ...] = (
    *(b"tep", b"STEP", b"ter", b"oss", b"LOSS", b"poch", b"%|", b"build time", b"Would install", b"uccessfully"),
    *(b"finished with", b"already satisfied", b"compiled w.", b"Installed ", b"Audited ", b"Built target"),
    *(b"heckpoint", b"transaction: ", b"bounds values", b"Result = ", b"Build files", b"naming to", b"]\t"),
)

NINJA = re.compile(rb"^\[\d{1,6}/", re.MULTILINE)
"""Parts of all progress and all ends, these two."""
MAX_BYTES = 4000  # so many bytes of a line are looked at, counted from its end
ERROR = form("lines", "error-by-form")

ASCEND = re.compile(rb"\bE[EHIJZ]\d{4}: |\bERR\d{5} \w")
"""The number of an error of Ascend's runtime; as a label it is no part of the clean line."""

NO_ERROR = re.compile(
    r"(?:ERROR: )?pip's dependency resolver|collect2: error: ld returned|fatal: not a git repository"
    r"|.{0,160}Unable to register cu\w{2,6} factory"
)
"""What looks like an error and is printed by runs that are well."""

PROGRESS = re.compile(
    rb"\b[Ee]poch['\"]?[ =:\[(]{1,3}\d|\d{1,3}%\|.{0,200}?\|\s{0,9}\d|^\[\d{1,6}/\d{1,6}\] \S|^\[\d{1,6}\]\t\w[^\t:]{0,60}: ?\d"
)
"""An epoch, a progress bar, a step of ninja, a round of boosting with its metrics."""

END = form_in_bytes("lines", "end-of-a-part")

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
MANY_ERRORS, PER_STEP = 12, 3  # so often, and so often in each step, comes an error that is none of a few samples
WENT_ON = 3  # after so many lines of progress an error by form is known to have been survived
A_WARNING = b": warning: "  # what gcc and clang only warn of; errors name the file, then ``error:``
MAX_ERRORS = 64  # so many lines that are errors by their form are remembered
TRACEBACK_HEADER = b"(most recent call "  # how Python begins the places of a traceback


@dataclass
class Health:
    """A log while it is read. ``progress`` and ``end``: the last line that shows it, 0 where none does.

    ``errors``: the lines that are errors by their form, ``frame``: the first place of a traceback without its head, after which
    there was neither an end nor enough progress. ``steps``: how many lines of progress there were since.
    """

    progress: int = 0
    end: int = 0
    errors: list[Line] = field(default_factory=list)
    frame: Line | None = None
    steps: int = 0
    repeated: dict[str, tuple[Line, int]] = field(
        default_factory=dict
    )  # errors by their words: the first line, how many
    begun: bool = False  # whether a traceback has begun and not yet ended

    def pass_lines(self, batch: Sequence[bytes], first: int, words: Iterable[bytes]) -> None:
        """Take the next lines; ``first`` is the number of the first of them, ``words`` are all of theirs in small letters."""
        whole, together = b"\n".join(batch).replace(b"\0", b""), b" ".join(words)
        # why: what is searched line by line costs as much as all else, and most batches have nothing of it
        maybe = any(hint in together for hint in IN_WORDS) or any(hint in whole for hint in BETWEEN_WORDS)
        hints = [hint for hint in HINTS if hint in whole] if maybe and len(self.errors) < MAX_ERRORS else []
        if not hints and not self._wants_progress:
            return
        shows = any(hint in whole for hint in PROGRESS_HINTS) or NINJA.search(whole)
        if not hints and not shows:
            return
        for number, raw in enumerate(batch, first):
            if any(hint in raw.replace(b"\0", b"") for hint in hints) and self._is_trouble(raw, number):
                continue
            if shows and self._wants_progress:
                self._take_progress(raw, number)

    @property
    def _wants_progress(self) -> bool:
        """Whether one more line of progress would add to what is known."""
        return not (self.progress or self.end) or bool(self.errors) or self.frame is not None or self.begun

    def _is_trouble(self, raw: bytes, number: int) -> bool:
        """Whether a line is an error by its form, or a place of a traceback. It is remembered."""
        raw = raw[-MAX_BYTES:].replace(b"\0", b"")
        if A_WARNING in raw or not MAYBE.search(raw):
            return False
        texts = segments(raw)
        if TRACEBACK_HEADER in raw:
            self.begun, self.steps = True, 0
        elif any(text.startswith('File "') and FRAME.match(text) for text in texts):
            if not self.begun and self.frame is None:
                self.frame, self.steps = Line(number, texts[-1]), 0
        elif text := next((text for text in texts if is_error(text, raw)), ""):
            self.begun = False
            self.steps = 0
            self._count(Line(number, text))
            if len(self.errors) < MAX_ERRORS:
                self.errors.append(Line(number, text))
        else:
            return False
        return True

    def _count(self, line: Line) -> None:
        """One more error of these words."""
        words = NUMBERS.sub("", line.text)[:80]
        if words in self.repeated or len(self.repeated) < MAX_ERRORS:
            first, times = self.repeated.get(words, (line, 0))
            self.repeated[words] = first, times + 1

    def of_each_step(self, timeline: Timeline) -> tuple[Line, int] | None:
        """An error that comes several times in each step of a training that goes on, and how often."""
        told = sum(1 for raw in timeline.recent if OF_A_STEP.search(raw[:4000]))
        often = [(line, times) for line, times in self.repeated.values() if times >= max(MANY_ERRORS, PER_STEP * told)]
        return max(often, key=lambda one: one[1], default=None) if told else None

    def _take_progress(self, raw: bytes, number: int) -> None:
        tail = raw[-400:]
        if END.search(raw[:400]):
            self.end = number
        elif STEP.search(tail) or FINITE.search(tail) or PROGRESS.search(tail):
            self.progress = number
            self.steps += 1
        else:
            return
        if self.end == number or self.steps >= WENT_ON:
            self.errors.clear()
            self.frame, self.begun = None, False


def is_error(text: str, raw: bytes = b"") -> bool:
    """Whether a clean line is an error by its form.

    >>> [is_error(text) for text in ("FAILED: x.cuda.o", "RayTaskError(ActorDiedError)", "ld: error: cannot find -lx")]
    [True, True, True]
    >>> [is_error(text) for text in ("errors: 0", "ERROR tracker: refused, will retry", "$ grep 'KeyError: x' run.log")]
    [False, False, False]
    """
    known = ERROR.match(text) or A_LOGGER.search(text[:120]) or ASCEND.search(raw[:200])
    if not known or NO_ERROR.match(text):
        return False
    return not (GOES_ON.search(text) or PROMPT.match(text) or SHOWN.match(text) or is_said(raw))


# Logs without an error line that are not well all the same: losses that are no numbers, an end in the middle of something.
MIN_NAN_LOSSES = 3  # so many losses in a row that are no numbers are no accident
SKIPPED = re.compile(rb"\bstep=(\d{1,9}), skipped=(\d{1,9})\b")

SCALE = re.compile(
    rb"(?:OVERFLOW!|[Oo]verflow detected\.).{0,80}Attempted loss scale: (\d{1,12}(?:\.\d{1,9})?), reducing to"
)

FEW_STEPS, MOSTLY_SKIPPED = 20, 0.8

HALVED, LOW_SCALE, AT_THE_END = 10, 16, 12
"""A search for the loss scale at the start ends far above this; one that goes on so low, up to the last lines, does not end."""

LAST_LINES = 6
AFTER_CUT = 3  # so many lines stand at most below the last place of a traceback that is cut off; more of them follow it

OF_A_STEP = re.compile(
    rb"\bstep[:= ]{1,2}\d{1,9}\b.{1,4000}\w[:=] {0,2}-?\d"
    rb"|\b[Ll]oss['\"]?\]?\s{0,3}[:=]?\s{0,3}['\"]?-?\d{1,9}\.\d|\bglobal_step/max_steps\b"
)
"""What a training says of a step that it has made: its number with figures, or a loss. A bar alone may be of anything."""

BAR = re.compile(rb"\d{1,3}%\|[^|]{0,200}\|\s{0,9}(\d{1,9})/(\d{1,9}) \[")

BAR_ENDED = re.compile(rb"\b(?:100%|done|finished|completed?|saved|train_runtime|[Ss]uccess)")


def losses_are_nan(timeline: Timeline, last_line: int, facts: Facts) -> Finding | None:
    """Losses, or gradient norms, that became nan and stayed so."""
    series = timeline.nans
    if series.count < MIN_NAN_LOSSES or series.finite_again(last_line, timeline.recent):
        return None
    if series.before:
        return _nan_in_the_backward(timeline, facts)
    return book.finding(
        "losses-are-nan",
        Severity.ERROR,
        evidence=(
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        value="gradient norm" if series.of_norms else "loss",
        since="" if series.step is None else f" from step {series.step}",
    )


def _nan_in_the_backward(timeline: Timeline, facts: Facts) -> Finding:
    """A loss that was a number, whose gradients were none: the backward pass made them, not the data nor the learning rate."""
    series = timeline.nans
    kernel = {"sdpa": "torch's SDPA", "eager": "eager attention"}.get((facts.attention or "").lower(), facts.attention)
    return book.finding(
        "losses-are-nan",
        Severity.ERROR,
        case="backward",
        evidence=(
            series.before,
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        attention=f" (attention in the log: {kernel})" if kernel else "",
    )


def steps_are_skipped(timeline: Timeline) -> Finding | None:
    """fp16 overflows on nearly every step up to the end of the log: the counter of skipped steps, or a loss scale that sinks."""
    recent = list(timeline.recent)
    counted = [found for raw in recent for found in SKIPPED.finditer(raw)]
    if counted:
        steps, skipped = int(counted[-1][1]), int(counted[-1][2])
        if steps >= FEW_STEPS and skipped >= MOSTLY_SKIPPED * steps:
            text = counted[-1][0].decode("utf-8", "replace")
            return book.finding(
                "fp16-loss-scale-floor",
                Severity.ERROR,
                case="skipped",
                evidence=(f"near the end of the log: {text}",),
                skipped=skipped,
                steps_count=steps,
            )
    scales = [(age, float(found[1]), found[0]) for age, raw in enumerate(recent) if (found := SCALE.search(raw))]
    values = list(dict.fromkeys(value for _, value, _ in scales))
    sinks = len(values) >= HALVED and values == sorted(values, reverse=True) and values[-1] <= LOW_SCALE
    if sinks and len(recent) - scales[-1][0] <= AT_THE_END:
        text = scales[-1][2].decode("utf-8", "replace")
        return book.finding(
            "fp16-loss-scale-floor",
            Severity.ERROR,
            case="sinking",
            evidence=(f"near the end of the log: {text}",),
            first=f"{values[0]:g}",
            last=f"{values[-1]:g}",
        )
    return None


def goes_on_steadily(timeline: Timeline) -> bool:
    """Whether a training has told figures of step after step, up to the last lines."""
    told = [age for age, raw in enumerate(reversed(timeline.recent)) if OF_A_STEP.search(raw[:4000])]
    return len(told) >= WENT_ON and told[0] < LAST_LINES


WAITS = re.compile(
    r"\b[Ww]aiting (?:for|to|until|on)\b|\bstill (?:waiting|pending)\b|\bcannot be scheduled\b|\b[Rr]etry(?:ing)?\b"
    r"|\bnot (?:yet )?ready\b|\b[Nn]o available node|\b(?:is|are) pending\b"
)
"""How a process says that it waits for something, or tries once more."""

NOT_ENOUGH = re.compile(
    rb"exceeds|[Nn]ot enough|[Ii]nsufficient|fewer than|less than|cannot be (?:satisfied|fulfilled)"
)
"""Words of a warning that there will never be as much as is waited for."""

WAITED_AGAIN, SAME_BEGIN = 2, 60
"""After so many lines alike in so many of their letters, without any progress, a process waits for what does not come."""


def stands_still(timeline: Timeline, last_line: int) -> Finding | None:
    """A log without progress that ends in lines which only repeat that a process waits for more than there is.

    That it is more, a warning says before them, or a cluster's status that somebody asked for after them. Without either what
    is waited for may come yet, and nothing is decided.
    """
    lines = [
        Line(last_line - age, last_segment(raw[:MAX_BYTES]))
        for age, raw in enumerate(reversed(timeline.recent))
        if raw.strip(b" \0\r\n")
    ]
    waits = [line for line in lines if WAITS.search(line.text)]
    alike = [line for line in waits if _begin(line) == _begin(waits[0])]
    behind = [line for line in lines if waits and line.number > waits[0].number]
    if len(alike) < WAITED_AGAIN or (behind and not PROMPT.match(behind[-1].text)):
        return None  # it waited once, or said something else after it
    last, first = alike[0], alike[-1]
    before = (line for line in lines if first.number - WENT_ON <= line.number < first.number)
    warned = next((line for line in before if NOT_ENOUGH.search(line.text.encode())), None)
    demands = [line for line in reversed(lines) if line.number > last.number and DEMAND.search(line.text)]
    if warned is None and not demands:
        return None  # it may come yet
    evidence = (
        *((f"line {warned.number}: {warned.text[:300]}",) if warned else ()),
        f"line {first.number}: {first.text[:300]}",
        f"{len(alike)} such lines, the last one is line {last.number}",
        *(f"line {line.number}: {line.text[:200]}" for line in demands),
    )
    return book.finding("stands-still", Severity.ERROR, evidence=evidence, words=last.text[:200])


DEMAND = re.compile(r"^\d[\d.]*/\d[\d.]* (?:CPU|GPU|NPU|TPU)|pending placement groups|^\{.{1,120}\}: \d+\+ pending")
"""What a cluster says that it has and that is asked of it."""


def _begin(line: Line) -> str:
    """What lines that repeat each other have in common."""
    return NUMBERS.sub("", line.text)[:SAME_BEGIN]


STATE = re.compile(rb"\|\s{0,9}(\d{1,9})/(\d{1,9}) \[\d|\bglobal_step/max_steps['\"]: ?['\"](\d{1,9})/(\d{1,9})")


def ends_within(timeline: Timeline) -> str:
    """At which step the log of a steady training ends, where that is not its last; "" where nothing shows it."""
    lines = [raw[-4000:] for raw in list(timeline.recent)[-LAST_LINES:]]
    states = [tuple(int(part) for part in found.groups() if part) for raw in lines for found in STATE.finditer(raw)]
    if not states or states[-1][0] >= states[-1][1] or not goes_on_steadily(timeline):
        return ""
    return f"the log ends at step {states[-1][0]} of {states[-1][1]}"


def cut_off(timeline: Timeline, last_line: int, *, is_json: bool) -> Finding | None:
    """A log that stops within a traceback, or within a progress bar."""
    begun = [one for mine in timeline.tracebacks.open.values() for one in mine]
    if begun and last_line - max(one.last for one in begun) <= AFTER_CUT and not timeline.failures:
        first = min(begun, key=lambda one: one.since)
        at = f"line {first.frames[-1].line} of {first.frames[-1].path}" if first.frames else f"line {first.since}"
        return book.finding(
            "log-cut-off",
            Severity.ERROR,
            case="traceback",
            evidence=(f"line {first.since}: Traceback (most recent call last):",),
            frame=at,
        )
    lines = [raw for raw in list(timeline.recent)[-LAST_LINES:] if raw.strip()]
    if is_json and lines and lines[-1].strip()[-1:] not in {b"}", b"]"}:
        return book.finding("log-cut-off", Severity.WARNING, case="json", evidence=("the log ends at its last line",))
    bars = [found for raw in lines[-1:] for found in BAR.finditer(raw[-600:])]
    bars = [] if goes_on_steadily(timeline) else bars
    if bars and int(bars[-1][1]) < int(bars[-1][2]) and not any(BAR_ENDED.search(raw[-400:]) for raw in lines[-1:]):
        state = f"{int(bars[-1][1])} of {int(bars[-1][2])}"
        return book.finding("log-cut-off", Severity.WARNING, evidence=(f"the log ends at {state}",), state=state)
    return None
