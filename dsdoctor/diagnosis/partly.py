"""Lines too long, or with words of too many rules, to be searched whole: what of them is searched, and how many there were."""

from dataclasses import dataclass

from dsdoctor.diagnosis.clean import LONGEST
from dsdoctor.diagnosis.index import Index, words_of
from dsdoctor.diagnosis.routine import A_COMMAND

CROWD, SHORT = 40, 300
"""How many entries a line may ask for: of a longer line with the words of more, less is searched, so that it costs no more.

Of real lines none asks for more than 25.
"""

CUT = 2 * LONGEST + 1
"""The length of a line whose middle ``raw_lines`` has thrown away already."""


@dataclass
class Partly:
    """The lines that were not searched whole: how many, the first and the last."""

    lines: int = 0
    first: int = 0
    last: int = 0

    def note(self, line: int) -> None:
        """This line is one of them."""
        if self.last != line:
            self.lines += 1
            self.first, self.last = self.first or line, line


def cut_matters(raw: bytes, index: Index) -> bool:
    """Whether what is cut out of a line may hold a word of the catalogue.

    Of a command that compiles it is flags, of a progress bar it is states that are past.
    """
    if A_COMMAND in raw or b"\r" in raw.rstrip():
        return False
    middle = words_of(raw[LONGEST * 3 // 4 - 1 : -LONGEST // 4])
    return len(raw) == CUT or not index.words.keys().isdisjoint(middle)


def part_to_search(text: str, entries: int) -> str:
    """What of a text is searched for so many entries: head and tail of a long one with words of very many."""
    room = max(SHORT, len(text) * CROWD // max(1, entries))
    if entries <= CROWD or len(text) <= room:
        return text
    return f"{text[: room * 3 // 4]} {text[-room // 4 :]}"
