"""A judged checkpoint -> lines, and what a document tells of it; how far a long reading is, as a line on a terminal."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from dsdoctor.checkpoint.deep import bytes_of, judge_values, tells_trainings
from dsdoctor.checkpoint.facts import Examined, Facts
from dsdoctor.checkpoint.folder import Repair
from dsdoctor.checkpoint.inert_pickle import count_of
from dsdoctor.checkpoint.judge import Judged
from dsdoctor.checkpoint.loading import LOAD_UNIVERSAL, Verdict
from dsdoctor.checkpoint.merge import Merged
from dsdoctor.checkpoint.parameters import left_by_universal, says_nothing
from dsdoctor.checkpoint.universal import Converted
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.text import and_more
from dsdoctor.ui.screen import first_step, most_harmful, next_line
from dsdoctor.ui.table import size
from dsdoctor.ui.terminal import VerdictLine, finding_lines

MAX_TAGS = 6
WORTH_TELLING = 256 << 20


def checkpoint_lines(judged: Judged, available: int | None) -> Iterator[str]:
    """What is there, the findings, and the verdict."""
    if judged.examined is not None:
        yield from _contents(judged.examined)
    yield from finding_lines(most_harmful(judged.findings))
    yield from _memory(judged, available)
    yield ""
    yield VerdictLine(verdict_line(judged))
    if command := first_step(judged.findings):
        yield next_line(command)


def _contents(examined: Examined) -> Iterator[str]:
    tag, facts = examined.tag.folder, examined.facts
    yield f"{tag.path}"
    yield f"    {_written(facts)}"
    bytes_there = sum(file.size for file in examined.tag.files)
    yield f"    {len(examined.tag.files)} file{'s' * (len(examined.tag.files) > 1)}, {size(bytes_there)}; {_parameters(examined)}"
    if len(examined.folder.tags) > 1:
        names = [each.name for each in reversed(examined.folder.tags)]
        yield f"    tags, newest first: {and_more(names, MAX_TAGS)}; latest: {_latest(examined)}"
    if examined.folder.beside:
        yield f"    Hugging Face weights next to it: {and_more(examined.folder.beside, 4)}"


def _latest(examined: Examined) -> str:
    named = examined.folder.latest
    return "not there" if named is None else named or "empty"


def _written(facts: Facts) -> str:
    """Who wrote it: stage, type, ranks, step, version; what no file says is left out."""
    stage = None if facts.stage is None else "no ZeRO" if facts.stage == 0 else f"ZeRO stage {facts.stage}"
    ranks = None if facts.world is None else f"{facts.world} rank{'s' * (facts.world > 1)}"
    if facts.model and facts.model > 1:
        ranks = f"{ranks} ({facts.data} data-parallel x {facts.model} model-parallel)"
    said = [
        "universal" if facts.universal else None,
        stage,
        facts.dtype or None,
        f"{and_more([str(each) for each in facts.experts], 4)} experts" if facts.experts else None,
        "pipeline" if facts.layers else None,
        ranks,
        None if facts.step is None else f"step {facts.step}",
        f"DeepSpeed {facts.version}" if facts.version else None,
    ]
    return ", ".join(part for part in said if part) or "no file shows which run wrote it"


def _parameters(examined: Examined) -> str:
    elements = sum(count_of(shape) for shape in examined.parameters.values())
    frozen = f", {len(examined.frozen)} frozen ones" if examined.frozen else ""
    return (
        f"{len(examined.parameters):,} parameters of {elements:,} elements{frozen}"
        if examined.parameters
        else "parameters unknown"
    )


def _memory(judged: Judged, available: int | None) -> Iterator[str]:
    if judged.outcome is None or judged.rank_bytes < WORTH_TELLING or available is None:
        return
    fit = available // judged.rank_bytes
    many = "no rank fits" if not fit else f"{fit:,} such ranks fit"
    yield f"· each rank reads {size(judged.rank_bytes)} at once to load; {many} into the {size(available)} that are free here"


def verdict_line(judged: Judged) -> str:
    """How it ends."""
    if judged.examined is None:
        return "✗ there is no checkpoint to judge"
    name = judged.examined.tag.folder.name
    errors = sum(finding.severity is Severity.ERROR for finding in judged.findings)
    if judged.outcome is None:
        return f"✗ {errors} error{'s' * (errors > 1)}: {name} is not judged for a run"
    if has_error(judged.findings):
        also = "" if judged.outcome.verdict is not Verdict.LOADS else "; the tag itself loads if you name it"
        return f"✗ {errors} error{'s' * (errors > 1)}{also}"
    if judged.outcome.verdict is Verdict.LOADS:
        seen = _looked_at(judged.examined, values=judged.values_read)
        return f"✓ {name} loads: {judged.outcome.why} ({seen}{_of_frozen(judged.examined)})"
    return f"! {name}: no errors, but whether it loads is unknown"


def _looked_at(examined: Examined, *, values: bool) -> str:
    """What the verdict rests on, and whether a file of another training, which loads as well as the right one, would show."""
    looked = "every byte was read" if values else "by names, steps and shapes, without values"
    if len(examined.tag.files) == 1:
        return looked
    if not tells_trainings(examined):
        return f"{looked}; a file from another run with the same names, steps and shapes would go undetected"
    return looked if values else f"{looked}: --deep checks whether all files come from one run"


def _of_frozen(examined: Examined) -> str:
    """What a load rests on that no file says."""
    return "; below stage 2 no file shows whether frozen parameters were left out" if says_nothing(examined) else ""


def merged_lines(judged: Judged, merged: Merged) -> Iterator[str]:
    """What was written."""
    name = judged.examined.tag.folder.name if judged.examined else ""
    yield from finding_lines(judged.findings)
    facts = judged.examined.facts if judged.examined else None
    if facts is not None and facts.stage == 0 and facts.dtype != "fp32":
        yield f"· without ZeRO, these are the model's own weights, in {facts.dtype or 'its type'}"
    if merged.kept:
        yield f"· {len(merged.kept)} of {len(merged.files)} files already existed, complete and from this checkpoint"
    many = f"{len(merged.files)} file{'s' * (len(merged.files) > 1)}"
    yield f"✓ {name} is merged into {merged.out}: {merged.tensors:,} tensors, {size(merged.size)} in {many}"


def converted_lines(judged: Judged, made: Converted) -> Iterator[str]:
    """What was made, and how a run takes it."""
    name = judged.examined.tag.folder.name if judged.examined else ""
    yield from finding_lines(judged.findings)
    alike = "every weight and optimizer state matches the saved one bit for bit"
    facts = judged.examined.facts if judged.examined else None
    checked = (
        alike
        if facts is not None and (facts.tensor or 1) == 1
        else "every parameter is present; sharded tensors were not compared"
    )
    yield f"· {checked}; the largest process took {size(made.peak_memory)}"
    yield f"· to load it: {LOAD_UNIVERSAL} in the configuration, and load_checkpoint({str(Path(made.out).parent)!r})"
    if judged.examined is not None and (left := left_by_universal(judged.examined)):
        yield f"· such a load does not restore {left}"
    yield f"✓ {name} is universal in {made.out}: {made.parameters:,} parameters, {size(made.size)}"


def repair_lines(repair: Repair) -> Iterator[str]:
    """What was done."""
    if repair.latest is not None:
        yield f"· latest is {repair.latest} now"
    yield from (f"· {names}" for names in repair.aside)
    if repair.latest is None and not repair.aside:
        yield "✓ nothing to repair: latest names a complete tag, and no newer one is incomplete"


def checkpoint_parts(judged: Judged) -> dict[str, Any]:
    """The parts of the document."""
    examined = judged.examined
    return {
        "folder": str(judged.folder.path),
        "latest": judged.folder.latest,
        "tags": tuple(tag.name for tag in judged.folder.tags),
        "tag": examined.tag.folder.name if examined else None,
        "facts": examined.facts if examined else None,
        "files": {file.path.name: file.size for file in examined.tag.files} if examined else {},
        "parameters": dict(examined.parameters) if examined else {},
        "frozen": dict(examined.frozen) if examined else {},
        "verdict": judged.outcome.verdict if judged.outcome else None,
        "why": judged.outcome.why if judged.outcome else "",
        "rank_bytes": judged.rank_bytes,
    }


class ReadProgress:
    """Shows bytes as they are read. Use as a context manager; where stderr is no terminal, no bar is drawn."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

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
        self._progress.console.print(f"* {line}", highlight=False, soft_wrap=True, markup=False)

    def judge_values(self, examined: Examined) -> Iterable[Finding]:
        """Judge all tensors of a tag, and show how far that is."""
        self.total(bytes_of(examined))
        return tuple(judge_values(examined, self.read))
