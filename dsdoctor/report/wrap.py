"""A line -> lines that fit a terminal: whole words, the rest indented; and marks in letters where a terminal has no others."""

import re
import textwrap
from collections.abc import Iterable, Iterator

COMMAND = re.compile(r"\s*(?:(?:(?:or|then|next:) )?\$ |[A-Z_][A-Z0-9_]*=)")
"""A command, or a variable with its value: to be pasted."""
LISTED = re.compile(r"\s*(?:[-*|>]|\d+\.) ")
RULE = re.compile(r"  \[[a-z0-9-]+\]$")
COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")
START = re.compile(r"\s*(?:(?:[✓✗!·*]|ok|!!|XX|--|\d+\.) +|Fix: )?")
FURTHEST = 36
"""The furthest that what goes on is indented."""
IN_LETTERS = {"✓": "ok", "!": "!!", "✗": "XX", "·": "--"}
MARKS = {*IN_LETTERS, *IN_LETTERS.values(), "*"}
OTHERS = str.maketrans({"…": "...", "µ": "u", "→": "->", "×": "x", "✗": "X", "✓": "v", "·": "-"})


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
    if len(parts) > 1 and parts[0].strip() in MARKS:
        # a mark does not stand alone: what is too long for any line stays beside it
        parts[:2] = [f"{parts[0]} {parts[1].lstrip()}"]
    return parts


def _below(line: str, width: int) -> int:
    """How far the rest of a line is indented: below its last column, where that leaves room for each of its words."""
    columns = [found.end() for found in COLUMN.finditer(RULE.sub("", line))]
    if columns and columns[-1] <= min(FURTHEST, width // 2):
        longest = max(map(len, line[columns[-1] :].split()), default=0)
        if columns[-1] + longest <= width:
            return columns[-1]
    return _start(line)


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


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _filled(lines: list[str], width: int) -> list[str]:
    indent = _indent(lines[0])
    text = " ".join(map(str.strip, lines))
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).splitlines()


def _start(line: str) -> int:
    """How far what goes on is indented: below the words behind the mark."""
    found = START.match(line)
    start = found.end() if found else 0
    return start + 2 if not line[:start].strip() else start


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
    return line.translate(OTHERS)
