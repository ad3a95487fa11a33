"""The line of an exception that a terminal or a box wrapped over several lines -> that line as it was."""

import re

from dsdoctor.diagnosis.speakers import NOBODY, Speaker

MOST, MOST_CUT, BETWEEN = 3, 8, 40
"""Over how many more lines it may go: wrapped between words, and cut where the lines were full; how many may stand between."""

WHOLE, LINE = 1000, 400
"""How long such an exception may be, and each of its lines."""

ANOTHER_PROGRAM = re.compile(
    r"(?:slurmstepd|slurmd|srun|sbatch|salloc|scancel|mpirun|mpiexec|mpiexec\.hydra|prterun|prted|orterun|orted|kubelet|kernel)"
    r"(?:\[\d{1,9}\])?: "
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
