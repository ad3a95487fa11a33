"""A pattern -> texts of which every match holds one. To look for them costs a tenth of what a search that fails costs."""

from dataclasses import dataclass, field

SHORTEST = 3
"""A shorter text is in too many lines to be worth looking for."""

NO_LETTERS = frozenset("dDwWsSbBAZ0123456789xuUNnrtfva")
"""What after a backslash is a kind of character, or a place, and no character itself."""


@dataclass
class Reader:
    """A pattern that is read from left to right."""

    pattern: str
    place: int = 0

    def peek(self) -> str:
        """The next character, or nothing at the end."""
        return self.pattern[self.place : self.place + 1]

    def take(self, length: int = 1) -> str:
        """The next characters, which are then read."""
        taken = self.pattern[self.place : self.place + length]
        self.place += length
        return taken

    def skip_class(self) -> None:
        """Read on behind a set in square brackets, whose first one was read."""
        if self.peek() == "^":
            self.place += 1
        first = self.place
        while self.peek() and (self.peek() != "]" or self.place == first):
            self.place += 2 if self.peek() == "\\" else 1
        self.place += 1

    def quantifier(self) -> tuple[bool, bool]:
        """Whether what was read may be left out, and whether it may come more than once."""
        rest = self.pattern[self.place :]
        if rest[:1] in {"?", "*", "+"}:
            self.place += 1
            found = (rest[0] != "+", rest[0] != "?")
        elif rest[:1] == "{" and rest[1:2].isdigit() and "}" in rest:
            inside = rest[1 : rest.index("}")]
            self.place += len(inside) + 2
            found = (inside.split(",")[0] == "0", True)
        else:
            return False, False
        if self.peek() == "?":
            self.place += 1
        return found


@dataclass
class Branch:
    """One alternative while it is read: the plain text that is read, and the best needles so far."""

    run: str = ""
    best: tuple[str, ...] = ()
    found: list[tuple[str, ...]] = field(default_factory=list)

    def end_run(self) -> None:
        """The plain text ends here."""
        self.offer((self.run,))
        self.run = ""

    def offer(self, needles: tuple[str, ...]) -> None:
        """Take needles if they are longer than those known."""
        if needles and min(map(len, needles)) > min(map(len, self.best), default=SHORTEST - 1):
            self.best = needles


def needles(pattern: str) -> tuple[str, ...]:
    r"""Texts of which every match of a pattern holds one; none where nothing is sure.

    >>> needles(r"^OSError: \[Errno 30\] Read-only file system(?:: '(?P<path>[^']{1,200})')?")
    ('OSError: [Errno 30] Read-only file system',)
    >>> needles(r"(?:CUDA|HIP) error: (?:no kernel|an ill)"), needles(r"(?:Key|Value)s"), needles(r"a|b"), needles(r"(?i)nan of it")
    ((' error: ',), ('Key', 'Value'), (), ())
    >>> needles(r"\bRetry(?:ing)? x{2,3}: (?!total)(?P<n>total=[1-9]\d)"), needles(r"'[^']+' missing|absent\.+")
    (('total=',), ("' missing", 'absent.'))
    """
    if "(?i" in pattern:
        return ()
    return _alternatives(Reader(pattern))


def _alternatives(reader: Reader) -> tuple[str, ...]:
    """The needles of what stands up to the end, or to the bracket that closes a group."""
    branches = [Branch()]
    while (char := reader.take()) and char != ")":
        branch = branches[-1]
        if char == "|":
            branch.end_run()
            branches.append(Branch())
        else:
            _read(char, reader, branch)
    branches[-1].end_run()
    every = [branch.best for branch in branches]
    return tuple(text for best in every for text in best) if all(every) else ()


def _read(char: str, reader: Reader, branch: Branch) -> None:
    """Read one part of an alternative."""
    if char == "(":
        branch.end_run()
        looks = reader.peek() == "?" and reader.pattern[reader.place + 1 : reader.place + 3].strip("<")[:1] in {
            "!",
            "=",
        }
        if reader.peek() == "?":
            _skip_kind(reader)
        inside = _alternatives(reader)
        optional, _ = reader.quantifier()
        if not optional and not looks:
            branch.offer(inside)
        return
    letter = char
    if char == "[":
        reader.skip_class()
        letter = ""
    elif char == "\\":
        letter = reader.take()
        letter = "" if letter in NO_LETTERS else letter
    elif char in ".^$":
        letter = ""
    optional, several = reader.quantifier()
    if not letter or optional:
        branch.end_run()
        return
    branch.run += letter
    if several:
        branch.end_run()


def _skip_kind(reader: Reader) -> None:
    """Read what says which kind of group it is: ``?:``, ``?P<name>``, ``?!``, ``?<=`` and the like."""
    kind = reader.take(2)
    if kind == "?P":
        # why: (?P=name) repeats what another group found, which nobody knows
        reader.place = reader.pattern.index(">" if reader.peek() == "<" else ")", reader.place)
        reader.place += reader.peek() == ">"
    elif kind == "?<":
        reader.take()
