"""The types that a log is read with, and the Diagnosis that comes out, of one log or of several logs of a job."""

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.diagnosis.catalogue import Rule, Signature, Tier
from dsdoctor.diagnosis.lines import is_said
from dsdoctor.diagnosis.timeline import NOBODY, Speaker


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the log says of its machine: versions, folders, flags. None or empty where it says nothing."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nvcc: str | None = None
    deepspeed: str | None = None
    transformers: str | None = None
    accelerate: str | None = None
    zero_stage: str | None = None
    experts: str | None = None
    attention: str | None = None
    gcc: str | None = None
    pip: str | None = None
    cuda_home: str | None = None
    cache: str | None = None
    standard: str | None = None
    accelerator: str | None = None
    nodes: str | None = None
    arch_list: str | None = None
    op: str | None = None
    project: str | None = None
    architectures: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A line that a signature matched: the first one of its kind, how many more there were, and the ``latest`` of them.

    ``said``: the line is a warning or a notice, or the program bore it; ``quoted``: it stands within a sentence.
    ``project``: the package that pip or its like was building then; "" where it had just installed one, None where unknown.
    """

    rule: Rule
    signature: Signature
    line: int
    text: str
    groups: dict[str, str]
    op: str | None = None
    count: int = 1
    latest: int = 0
    speaker: Speaker = NOBODY
    speakers: frozenset[Speaker] = frozenset()
    said: bool = False
    quoted: bool = False
    project: str | None = None

    def in_case(self, name: str) -> "Hit":
        """The hit in the words of a case of its rule. Raises StopIteration where the rule has no such case."""
        case, own = next(case for case in self.rule.cases if case.name == name), self.signature
        title = case.title.replace("{title}", own.title or self.rule.title)
        steps = own.steps if case.steps is None else case.steps
        words = replace(own, title=title or own.title, fix=case.fix or own.fix, steps=steps)
        return replace(self, signature=words)

    @property
    def sample(self) -> str:
        """The line that its wording is known by."""
        return self.signature.sample.rpartition("\n")[2]

    @property
    def aside(self) -> bool:
        """Whether somebody only says what a process prints that fails of it."""
        return self.quoted or (self.said and not is_said(self.sample.encode()))

    @property
    def tier(self) -> Tier:
        """The tier of the wording that was found."""
        return self.signature.tier

    @property
    def precise(self) -> bool:
        """Whether it names one problem, and not a whole class of them."""
        return self.tier < Tier.GENERIC


@dataclass(frozen=True, kw_only=True)
class ReaderError:
    """An exception of dsdoctor's own while a log was read. ``line``: at which one; 0 where it is of the whole log."""

    line: int
    error: str

    @classmethod
    def of(cls, error: Exception, line: int = 0) -> "ReaderError":
        """The error with the place in dsdoctor where it was raised."""
        place, at = "", error.__traceback__
        while at:
            place, at = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}", at.tb_next
        return cls(line=line, error=f"{type(error).__name__}: {str(error)[:200]} ({place})")


class LogOutcome(enum.Enum):
    """The result of reading a log."""

    CAUSE = "cause"
    ONLY_ECHOES = "only-echoes"
    RAISED = "raised"
    UNEXPLAINED = "unexplained"
    HEALTHY = "healthy"
    UNFINISHED = "unfinished"
    UNDECIDED = "undecided"
    EMPTY = "empty"


class LogVerdict(enum.Enum):
    """What a log shows of the run: healthy only where an end or progress is in it."""

    HEALTHY = "healthy"
    FAILED = "failed"
    UNDECIDED = "undecided"


VERDICTS = {
    LogOutcome.HEALTHY: LogVerdict.HEALTHY,
    LogOutcome.UNFINISHED: LogVerdict.UNDECIDED,
    LogOutcome.UNDECIDED: LogVerdict.UNDECIDED,
    LogOutcome.EMPTY: LogVerdict.UNDECIDED,
}
"""All other outcomes are failures."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one log says. ``findings``: the cause first.

    ``where``: on which ranks it began, and ``activity``: what they were doing; "" where the log does not say. Of a healthy log
    ``activity`` says at which step it ends, where that is not the last.
    ``follows``: the first finding only says that another process is gone or does not come. ``silent``: it shows neither trouble nor
    health, so that another log of the same job may speak for it. ``without_ranks``: the first finding's title without ``where``.
    """

    name: str
    lines: int
    outcome: LogOutcome
    facts: Facts
    findings: tuple[Finding, ...]
    where: str = ""
    activity: str = ""
    follows: bool = False
    silent: bool = False
    without_ranks: str = ""

    @property
    def verdict(self) -> LogVerdict:
        """Healthy, failed, or neither can be said."""
        return VERDICTS.get(self.outcome, LogVerdict.FAILED)


# The diagnoses of several logs of one run, a log for each rank -> what only follows is told as such.
def together(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Where one log has a failure of its own, the others' closed connections and timeouts are notes."""
    own = [diagnosis for diagnosis in diagnoses if has_error(diagnosis.findings) and not diagnosis.follows]
    if not own:
        return diagnoses
    return [_as_notes(diagnosis) if diagnosis.follows else diagnosis for diagnosis in diagnoses]


def verdict_of(diagnoses: list[Diagnosis], *, one_job: bool = False) -> LogVerdict:
    """The verdict on a run of which these are the logs: each of them has to show that it is well.

    ``one_job``: they are all logs of one job, so those that say nothing of its end are spoken for by those that do.
    """
    speak = [diagnosis for diagnosis in diagnoses if not diagnosis.silent] if one_job else []
    verdicts = {diagnosis.verdict for diagnosis in speak or diagnoses}
    worst_first = (LogVerdict.FAILED, LogVerdict.UNDECIDED, LogVerdict.HEALTHY)
    return next(verdict for verdict in worst_first if verdict in verdicts)


def problem_of(finding: Finding, diagnosis: Diagnosis) -> tuple[str, str]:
    """What makes findings of several logs one problem: the rule, and the title without the rank."""
    first = diagnosis.findings[0]
    return finding.rule, diagnosis.without_ranks or finding.title if finding is first else finding.title


def _as_notes(diagnosis: Diagnosis) -> Diagnosis:
    findings = tuple(replace(finding, severity=Severity.NOTE) for finding in diagnosis.findings)
    return replace(diagnosis, findings=findings)
