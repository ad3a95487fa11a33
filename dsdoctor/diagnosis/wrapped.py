"""The line of an exception that a terminal or a box wrapped over several lines -> that line as it was."""

MOST, MOST_CUT = 3, 8
"""Over how many more lines it may go: wrapped between words, and cut where the lines were full."""

WHOLE, LINE = 1000, 400
"""How long such an exception may be, and each of its lines."""

WIDTHS = frozenset({72, 80, 100, 120, 132, 160, 200})
"""What terminals and pages cut lines at, in the middle of words."""


class WrappedLine:
    """The line of an exception with those after it, joined; ``text`` is "" where nothing more can belong to it, and
    ``since`` the number of its first line."""

    def __init__(self) -> None:
        self.text = ""
        self._raw, self._width, self.since = b"", 0, 0

    @property
    def cut(self) -> bool:
        """Whether the exception's own line is as long as a terminal is wide: what is known of it may be of its half."""
        return self._width in WIDTHS

    def begin(self, text: str, raw: bytes, line: int) -> None:
        """An exception's line. ``raw`` is it with what stands before the clean text."""
        self.text = text if len(text) <= WHOLE else ""
        self._raw = raw.rstrip(b"\r\n")
        self._width, self.since = len(self._raw), line

    def joined(self, text: str, raw: bytes, line: int) -> str:
        """The line together with the next one; "" where that one is too long to be a part of it."""
        raw = raw.rstrip(b"\r\n")
        whole = f"{self.text}{'' if self._cuts_words(raw) else ' '}{text}"
        ended = line - self.since >= (MOST_CUT if self.cut else MOST) or len(text) > LINE or len(whole) > WHOLE
        self.text, self._raw = "" if ended else whole, raw
        return "" if len(text) > LINE else whole

    def _cuts_words(self, raw: bytes) -> bool:
        """Whether the line before was cut where it was full, and not between words."""
        full = len(self._raw) == self._width and self.cut
        return full and not self._raw.endswith(b" ") and not raw.startswith(b" ")
