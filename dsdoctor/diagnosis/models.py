"""The types that a log is read with, and the Diagnosis that comes out, of one log or of several logs of a job."""

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.diagnosis.lines import is_said
from dsdoctor.diagnosis.timeline import NOBODY, Speaker


class Stage(enum.Enum):
    """At which stage of using DeepSpeed the problem shows."""

    INSTALL = "install"
    COMPILE = "compile"
    LINK = "link"
    JIT = "jit"
    LOAD = "load"
    LAUNCH = "launch"
    RUN = "run"


class Tier(enum.IntEnum):
    """How much a line says about the cause; the lowest counts, then the earliest line.

    FILE: a compiler or linker names the file. NAMED: an exception says what the problem is. GENERIC: true, but often the
    consequence of something more precise. PROBE: harmless, unless the log failed and nothing else explains why. ECHO: only
    repeats that a compile failed. EXIT: only says that something ended badly.
    """

    FILE = 0
    NAMED = 1
    GENERIC = 2
    PROBE = 3
    ECHO = 4
    EXIT = 5


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One wording of a rule.

    ``words``: separated by blanks; a line is searched only if it has one of them, as a whole word of letters, digits and
    ``_``, whatever its case; of ``a+b`` it must have both. A word with other letters than ASCII may be part of a word.
    ``pattern``, searched in the clean line, decides. ``after``: must be found in the lines just
    above, ``not_after`` must not. ``unless``: must not be found in the line.
    ``stands``: it is true of the result, however well the log ended; a probe of that kind is a WARNING.
    ``sample``: what a tool prints; its last line is the one that matches. Texts are templates (see ``fill``).
    ``brief``: its title where the log says more, which then follows it.
    ``steps``: as the book writes them; None stands for its rule's.
    ``persists``: it stays true although the training went on after it. ``harmless``: its title says when it does no harm, which is
    not true of what ended a log. ``owner``: "project" counts only where a project's code raised the exception, not the user's own.
    """

    pattern: str
    sample: str
    words: str = ""
    tier: Tier = Tier.NAMED
    after: str = ""
    not_after: str = ""
    unless: str = ""
    op: str = ""
    title: str = ""
    brief: str = ""
    fix: str = ""
    steps: tuple[str, ...] | None = None
    stands: bool = False
    persists: bool = False
    harmless: bool = False
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Other words of a rule, for what code knows beside a line. What it leaves empty stays as the wording or the rule has it.

    ``{title}`` in its title stands for the title that it follows.
    """

    name: str
    title: str = ""
    fix: str = ""
    steps: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One problem with all its wordings. ``explained_by``: rules of which it is a consequence.
    ``general``: it knows a kind of exception, and is asked only of the failure that was chosen as the cause, where no other rule
    knows it.
    """

    id: str
    stage: Stage
    title: str
    fix: str
    signatures: tuple[Signature, ...]
    steps: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    explained_by: tuple[str, ...] = ()
    general: bool = False


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
