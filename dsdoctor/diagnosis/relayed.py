"""A log whose every line a logger passed on with a level in front, as schedulers of tasks do: what it passes on is no warning."""

import re
from dataclasses import dataclass

from dsdoctor.diagnosis.said import is_said

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
