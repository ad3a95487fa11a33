"""A history of nodes -> lines for a terminal: the nodes that failed again, or that none did."""

from collections.abc import Iterator

from dsdoctor.commands.comm_prolog import History
from dsdoctor.ui.screen import first_step, next_line, screen_lines


def history_lines(history: History) -> Iterator[str]:
    """The verdict, with what to do."""
    counted = f"{history.nodes:,} node{'s' * (history.nodes != 1)} in {history.tests:,} tests, of which {history.failed:,} failed"
    if not history.findings:
        yield f"✓ no node failed twice ({counted})"
        return
    yield from screen_lines(history.findings)
    yield f"  {counted}"
    if command := first_step(history.findings):
        yield next_line(command)
