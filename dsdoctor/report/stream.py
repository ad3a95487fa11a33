"""stdout or stderr as a screen: how wide it is, whether it is a terminal, whether it has colours."""

import os
import sys
from collections.abc import Mapping
from typing import IO, Protocol

USUAL_WIDTH = 80
WITHOUT_COLOURS = {"dumb", "unknown"}


class Screen(Protocol):
    """Where lines are shown: a Stream, or rich's Console."""

    @property
    def file(self) -> IO[str]:
        """What is written to."""

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks."""

    @property
    def width(self) -> int:
        """Its columns."""

    @property
    def encoding(self) -> str:
        """What its characters become."""

    @property
    def no_color(self) -> bool:
        """Whether colours are unwanted there."""


class Stream:
    """A standard stream. rich has the same, and takes longer to be imported than most commands take."""

    def __init__(self, *, stderr: bool = False, environment: Mapping[str, str] = os.environ) -> None:
        self.file: IO[str] = sys.stderr if stderr else sys.stdout
        self._environment = environment
        forced = environment.get("FORCE_COLOR")
        self.is_terminal = bool(forced) if forced is not None else self.file.isatty()
        self.no_color = bool(environment.get("NO_COLOR")) or environment.get("TERM", "") in WITHOUT_COLOURS
        self.encoding = getattr(self.file, "encoding", None) or "utf-8"

    @property
    def width(self) -> int:
        """What COLUMNS says, else the terminal itself."""
        said = self._environment.get("COLUMNS", "")
        if said.isdigit() and int(said):
            return int(said)
        for number in (0, 1, 2):
            try:
                return os.get_terminal_size(number).columns or USUAL_WIDTH
            except OSError:
                continue
        return USUAL_WIDTH
