"""Progress of a build -> a live table on a terminal, plain lines elsewhere. Written to the console that it is given.

What draws a live table is imported where there is a build: most commands have none.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console, Group
    from rich.live import Live

    from dsdoctor.core.build_models import OpProgress


MARKS = {"waiting": "·", "compiling": "…", "built": "✓", "cached": "✓", "failed": "✗", "interrupted": "·"}
MIN_COLUMNS_FOR_WORDS = 60
"""Columns from which the state stands in words beside its mark."""
ENDED = {"built", "cached", "failed", "interrupted"}


class BuildProgress:
    """Shows the progress of each op as it comes. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        """Without ``console`` it is stderr's."""
        self._given = console
        self._steps: dict[str, OpProgress] = {}
        self._since: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._live: Live | None = None
        self._begun = time.monotonic()

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return self._given or Console(stderr=True)

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print one plain line."""
        self._console.print(f"* {line}", highlight=False, soft_wrap=True, markup=False)

    def step(self, step: OpProgress) -> None:
        """Show that an op moved on; called from the compile threads."""
        before = self._steps.get(step.op)
        self._steps[step.op] = step
        if step.state == "compiling":
            self._since.setdefault(step.op, time.monotonic())
        if step.state in ENDED and step.op in self._since:
            self._took[step.op] = time.monotonic() - self._since[step.op]
        if self._console.is_terminal:
            self._start()
        elif before is None or before.state != step.state:
            self._line(step)

    def _start(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._begun = time.monotonic()
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
            self._live.start()
        if all(step.state in ENDED for step in self._steps.values()):
            self._live.stop()
            self._live = None

    def _table(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from dsdoctor.ui.terminal import has_marks, in_letters

        table, wide, marks = (
            Table.grid(padding=(0, 2)),
            self._console.width >= MIN_COLUMNS_FOR_WORDS,
            has_marks(self._console),
        )
        for op, step in tuple(self._steps.items()):
            # what waits shows how long it has waited: a terminal on which nothing moves looks dead
            seconds = self._took.get(op) or (time.monotonic() - self._since.get(op, self._begun))
            mark = MARKS[step.state] if marks else in_letters(MARKS[step.state])
            state = [step.state] if wide else []
            # of an op that ended without having been compiled, as one from the cache, there is nothing to count
            counted = (
                []
                if step.state in ENDED and op not in self._took
                else [f"{step.done}/{step.total}", f"{seconds:.0f} s"]
            )
            table.add_row(mark, op, *state, *counted)
        left = self._left()
        return Group(table, *([] if left is None else [Text(f"about {left:.0f} s left")]))

    def _left(self) -> float | None:
        """Seconds that the ops under way still take, by earlier builds; None where one of them was never built before."""
        going = [step for step in tuple(self._steps.values()) if step.state not in ENDED]
        if not going or any(step.expected is None for step in going):
            return None
        left = 0.0
        for step in going:
            took = time.monotonic() - self._since[step.op] if step.op in self._since else 0.0
            # an op of few files shows nothing for long: its own time counts too
            part = max(step.done / max(1, step.total), min(0.95, took / max(1.0, (step.expected or 0.0) * len(going))))
            left += (step.expected or 0.0) * (1.0 - part)
        return left

    def _line(self, step: OpProgress) -> None:
        if step.state != "waiting":
            took = f" in {self._took[step.op]:.0f} s" if step.op in self._took else ""
            if step.state == "compiling" and step.expected is not None:
                took = f", about {step.expected:.0f} s of this build by an earlier one"
            self._console.print(f"* {step.op}: {step.state}{took}", highlight=False, markup=False)
