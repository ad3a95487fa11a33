"""How far a long reading of a checkpoint is: a line on a terminal, nothing elsewhere."""

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from dsdoctor.checkpoint.deep import bytes_of, judge_values
from dsdoctor.checkpoint.examine import Examined
from dsdoctor.core.finding import Finding


class ReadProgress:
    """Shows bytes as they are read. Use as a context manager; with ``quiet``, and where nobody looks, it shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._quiet = quiet
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)

    def __enter__(self) -> "ReadProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def total(self, count: int) -> None:
        """So many bytes are to be read."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task("", total=count)

    def read(self, count: int) -> None:
        """So many were read."""
        for task in self._progress.task_ids:
            self._progress.advance(task, count)

    def tell(self, line: str) -> None:
        """A line on stderr, wherever that leads, before something that takes long."""
        if not self._quiet:
            self._progress.console.print(f"* {line}", highlight=False, soft_wrap=True, markup=False)

    def judge_values(self, examined: Examined) -> Iterable[Finding]:
        """Judge all tensors of a tag, and show how far that is."""
        self.total(bytes_of(examined))
        return tuple(judge_values(examined, self.read))
