"""Lines on a terminal: wrapped to its width, without what steers it, coloured by their marks; a finding as such lines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Protocol

from dsdoctor.core.finding import Finding, Follows, Severity
from dsdoctor.core.processes import whole_number
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

MARKS = {Severity.NOTE: "·", Severity.WARNING: "!", Severity.ERROR: "✗"}
BOLD, DIM = "1", "2"
STYLES = {"✓": "32", "!": "33", "✗": "31", "·": DIM}
MAX_NAMES = 6
STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
NEXT = "  next: $ "
TITLE = re.compile(r"[✗!] .*\[[a-z0-9-]+\]$")
RULE = re.compile(r"\s*\[[a-z0-9-]+\]$")
COMMAND = re.compile(r"\s*(?:(?:(?:or|then|next:) )?\$ |[A-Z_][A-Z0-9_]*=)")
"""A command, or a variable with its value: to be pasted."""
LISTED = re.compile(r"\s*(?:[-*|>]|\d+\.) ")
RULE_AT_END = re.compile(r"  \[[a-z0-9-]+\]$")
COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")
START = re.compile(r"\s*(?:(?:[✓✗!·*]|ok|!!|XX|--|\d+\.) +|Fix: )?")
MAX_INDENT = 36
"""The furthest that what goes on is indented."""
IN_LETTERS = {"✓": "ok", "!": "!!", "✗": "XX", "·": "--"}
MARKS_OF_LINES = {*IN_LETTERS, *IN_LETTERS.values(), "*"}
ASCII = str.maketrans({"…": "...", "µ": "u", "→": "->", "×": "x", "✗": "X", "✓": "v", "·": "-"})
LIKE_OURS = re.compile(r"\s*(?:(?:(?:or|then|next:) )?\$ |Fix:|[✓✗!·] )")
"""What a line of our own begins with: a command, a fix, a mark."""
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
        if columns := whole_number(self._environment.get("COLUMNS", "")):
            return columns
        for number in (0, 1, 2):
            try:
                return os.get_terminal_size(number).columns or USUAL_WIDTH
            except OSError:
                continue
        return USUAL_WIDTH


class VerdictLine(str):
    """The line that says how it is: it stands out among the others."""

    __slots__ = ()


def show(screen: Screen, lines: Iterable[str]) -> None:
    """Print lines: a mark at the start is coloured, titles and verdicts are bold. On a terminal, or where COLUMNS says how
    wide, words wrap.

    In a pipe a line stays whole, so that it can be searched. A reader that has gone away ends it without an error.
    """
    width, in_ascii, colours = screen_width(screen), not has_marks(screen), screen.is_terminal and not screen.no_color
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            text = printable(line)
            mark = text.lstrip()[:1]
            text = in_letters(text) if in_ascii else text
            for place, part in enumerate(wrapped(text, width) if width else [text]):
                shown = _styled(part, line, mark, first=not place) if colours else part
                screen.file.write(f"{shown}\n")
        screen.file.flush()


def show_talk(screen: Screen, line: str) -> None:
    """A line about what goes on, which is no result."""
    show(screen, [f"* {line}"])


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Title with its rule, evidence, the fix and its commands."""
    for finding in findings:
        yield f"{MARKS[finding.severity]} {finding.title}  [{finding.rule}]"
        yield from map(evidence_line, finding.evidence)
        if len(finding.affects) > 1 or (finding.affects and not book.titles_have(finding.rule, "op")):
            yield f"    affects {and_more(finding.affects, MAX_NAMES)}"
        if finding.fix:
            yield f"    Fix: {finding.fix.text}"
            for place, step in enumerate(finding.fix.steps):
                word = "or" if step.follows is Follows.ALTERNATIVE else "then" if place else ""
                yield f" {word:>4} $ {step.printed}"


def evidence_line(evidence: str) -> str:
    """A line of evidence, which may be somebody else's: what looks like a line of ours is marked as a quotation.

    >>> print(evidence_line("  $ touch x"), evidence_line("/usr/bin/nvcc"), sep="\\n")
        | $ touch x
        /usr/bin/nvcc
    """
    return f"    | {evidence.strip()}" if LIKE_OURS.match(evidence) else f"    {evidence}"


def wrapped(line: str, width: int) -> list[str]:
    """A line as it is where it fits, else in pieces. A command stays whole, to be pasted; of a row of a table the words in its
    last column stay below each other, where there is room for them.

    >>> print(*wrapped("✗ one two three  [a-rule]", 14), sep="\\n")
    ✗ one two
      three
      [a-rule]
    >>> wrapped("✓ /a/path/that/is/too/long now", 14)
    ['✓ /a/path/that/is/too/long', '  now']
    >>> wrapped("    then $ a long command", 10), wrapped("one  two  three  four", 10)
    (['    then $ a long command'], ['one  two', '  three', '  four'])
    >>> wrapped("    /a/path/that/is/too/long in f", 14)
    ['    /a/path/that/is/too/long', '      in f']
    >>> print(*wrapped("✓ mesh  0.3 s  2 of 2 directions met", 30), sep="\\n")
    ✓ mesh  0.3 s  2 of 2
                   directions met
    """
    if len(line) <= width or COMMAND.match(line):
        return [line]
    wrapper = textwrap.TextWrapper(
        width=width, subsequent_indent=" " * _below(line, width), break_long_words=False, break_on_hyphens=False
    )
    # what is too long for any line keeps its place
    wrapper.initial_indent = _indent(line)
    parts = wrapper.wrap(line.lstrip())
    if len(parts) > 1 and parts[0].strip() in MARKS_OF_LINES:
        # a mark does not stand alone: what is too long for any line stays beside it
        parts[:2] = [f"{parts[0]} {parts[1].lstrip()}"]
    # what others wrote may be broken where the rest looks like a command or a mark of ours
    return [parts[0], *(_no_line_of_ours(part) for part in parts[1:])]


def flowed(lines: Iterable[str], width: int) -> Iterator[str]:
    """Paragraphs that were written with breaks of their own, broken for this width. Commands and lists stay as they are.

    >>> list(flowed(["    one two", "    three", "", "        $ a command"], 14))
    ['    one two', '    three', '', '        $ a command']
    >>> list(flowed(["    one two", "    three", "", "        $ a command"], 40))
    ['    one two three', '', '        $ a command']
    """
    together: list[str] = []
    for line in lines:
        plain = bool(line.strip()) and not COMMAND.match(line) and not LISTED.match(line)
        if together and not (plain and _indent(line) == _indent(together[0])):
            yield from _filled(together, width)
            together = []
        if plain:
            together.append(line)
        else:
            yield line
    if together:
        yield from _filled(together, width)


def in_letters(line: str) -> str:
    """A line for a terminal that has ASCII alone: marks that differ from each other.

    >>> in_letters("  ✗ a…"), in_letters("! b"), in_letters("c!")
    ('  XX a...', '!! b', 'c!')
    >>> in_letters("✗  a cell  ✗")
    'XX a cell  X'
    """
    words = line.lstrip()
    mark = IN_LETTERS.get(words[:1]) if words[1:2] in {" ", ""} else None
    if mark:
        # in a column of its own a mark has room for a letter more
        rest = words[2:] if words[1:3] == "  " else words[1:]
        line = line[: len(line) - len(words)] + mark + rest
    return line.translate(ASCII)


def printable(line: str) -> str:
    """A line with what steers a terminal escaped, because it may hold text of others: control characters, directions, breaks.

    >>> print(printable("a\\x1b[31mb\\nc\\udce9 \\u202ex"))
    a\\x1b[31mb\\x0ac\\udce9 \\u202ex
    """
    if line.isprintable():
        return line
    return "".join(_escaped(char) if unicodedata.category(char) in STEERING else char for char in line)


def screen_width(screen: Screen) -> int | None:
    """The columns that a line may have; None where it is not broken."""
    return screen.width if screen.is_terminal or whole_number(os.environ.get("COLUMNS", "")) else None


def has_marks(screen: Screen) -> bool:
    """Whether the terminal's encoding has our marks."""
    try:
        "✓✗·".encode(screen.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _styled(part: str, line: str, mark: str, *, first: bool) -> str:
    """A part of a line with its colours. ``mark``: the line's own, which may stand there in letters."""
    if isinstance(line, VerdictLine):
        return _painted(part, BOLD, STYLES.get(mark, ""))
    if line.startswith(NEXT):
        return _painted(part, BOLD)
    if mark not in STYLES:
        return part
    begin = len(part) - len(part.lstrip()) + len(part.split(maxsplit=1)[0]) if first else 0
    coloured, rest = part[:begin], part[begin:]
    if not TITLE.match(line):
        return _painted(coloured, STYLES[mark]) + rest
    rule = RULE.search(rest)
    end = rule.start() if rule else len(rest)
    return _painted(coloured, BOLD, STYLES[mark]) + _painted(rest[:end], BOLD) + _painted(rest[end:], DIM)


def _painted(text: str, *codes: str) -> str:
    return f"\x1b[{';'.join(filter(None, codes))}m{text}\x1b[0m" if text else ""


def _escaped(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _no_line_of_ours(part: str) -> str:
    """The rest of a broken line, marked where it begins like a line that we print by ourselves.

    >>> _no_line_of_ours("      $ touch x"), _no_line_of_ours("      cost $ 5")
    ('      | $ touch x', '      cost $ 5')
    """
    return f"{_indent(part)}| {part.lstrip()}" if LIKE_OURS.match(part) else part


def _below(line: str, width: int) -> int:
    """How far the rest of a line is indented: below its last column, where that leaves room for each of its words."""
    columns = [found.end() for found in COLUMN.finditer(RULE_AT_END.sub("", line))]
    if columns and columns[-1] <= min(MAX_INDENT, width // 2):
        longest = max(map(len, line[columns[-1] :].split()), default=0)
        if columns[-1] + longest <= width:
            return columns[-1]
    return _start(line)


def _start(line: str) -> int:
    """How far what goes on is indented: below the words behind the mark."""
    found = START.match(line)
    start = found.end() if found else 0
    return start + 2 if not line[:start].strip() else start


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _filled(lines: list[str], width: int) -> list[str]:
    indent = _indent(lines[0])
    text = " ".join(map(str.strip, lines))
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).splitlines()
