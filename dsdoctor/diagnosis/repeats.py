"""Lines that come again and again -> what they led to the first time, so that they are not searched anew."""

import re
from dataclasses import dataclass, field

from dsdoctor.diagnosis.marks import Event

SEEN, REMEMBERED = 1000, 4000
"""How many different lines are remembered with their effect, and how long such a line may be."""

ALIKE = 3000
"""After so many lines of one form with the same effect, each further one is taken to have it too."""

NUMBER = re.compile(rb"\d{3,}")
"""What may differ between lines of one form. Shorter numbers tell ranks, signals and errors apart."""


@dataclass
class Effect:
    """What a line led to. ``repeats``: the same line leads to the same again, wherever it is; ``partly``: not all of it was
    searched."""

    marks: list[tuple[Event, str]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    repeats: bool = True
    partly: bool = False

    def is_like(self, other: "Effect") -> bool:
        """Whether another line led to the same."""
        events = [event for event, _ in self.marks]
        return (self.hits, self.partly, events) == (other.hits, other.partly, [event for event, _ in other.marks])


@dataclass
class Form:
    """Lines that differ in long numbers only: what the last of them led to, and how many in a row led to it."""

    effect: Effect
    times: int = 1


@dataclass
class Repeats:
    """What is remembered of the lines of a log."""

    lines: dict[bytes, Effect] = field(default_factory=dict)
    forms: dict[bytes, Form] = field(default_factory=dict)
    settled: bool = False
    """Whether one form has come so often that it is worth looking for."""

    def recall(self, raw: bytes) -> Effect | None:
        """What this line, or very many lines of its form, led to."""
        if (effect := self.lines.get(raw)) or not self.settled:
            return effect
        form = self.forms.get(NUMBER.sub(b"0", raw))
        return form.effect if form and form.times >= ALIKE else None

    def keep(self, raw: bytes, effect: Effect) -> None:
        """Remember what a line led to."""
        if len(raw) > REMEMBERED or not effect.repeats:
            return
        if len(self.lines) >= SEEN:
            self.lines.clear()
        self.lines[raw] = effect
        name = NUMBER.sub(b"0", raw)
        form = self.forms.get(name)
        if form and form.effect.is_like(effect):
            form.times += 1
            self.settled = self.settled or form.times >= ALIKE
            return
        if len(self.forms) >= SEEN:
            self.forms = {known: form for known, form in self.forms.items() if form.times >= ALIKE}
        if len(self.forms) < SEEN:
            self.forms[name] = Form(effect)
