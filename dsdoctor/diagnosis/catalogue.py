"""All that lines are searched for: rules of known failures, regressions that some releases have, marks of how a log went, facts.

They stand in the book: ``rules/logs`` has the rules and regressions, ``rules/forms`` the marks and the clues of facts.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dsdoctor.rules.store import Table, forms, log_table


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
    ``parts``: apart by line breaks; a match has one of them as it stands.
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
    parts: str = ""
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

    ``{title}`` in its title stands for the title that it follows. ``where``: what else has to be in the log, where the book alone
    tells it.
    """

    name: str
    title: str = ""
    fix: str = ""
    steps: tuple[str, ...] | None = None
    where: Table = field(default_factory=dict, compare=False)


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


GITHUB = "https://github.com/"

REGRESSION_TOPIC = "regressions"

READ = {name: name for name in ("deepspeed", "torch", "transformers", "accelerate")}
"""The packages whose version a log is read for, with the name of that fact."""


@dataclass(frozen=True, kw_only=True)
class Regression:
    """One fault of a release. ``broken``: the releases, as a sentence says them. ``cure``: the release that mends it,
    or the last good.

    ``words``, ``parts``, ``pattern``, ``after``, ``tier`` and ``sample`` as in Signature. ``needs_version``: its symptom has other
    reasons too, so it counts only where the log names a version that has the fault. ``stages``: the ZeRO stages that have it, all
    if "".
    """

    package: str
    broken: str
    what: str
    cure: str
    sources: tuple[str, ...]
    pattern: str
    sample: str
    words: str = ""
    parts: str = ""
    first: str = ""
    last: str = ""
    after: str = ""
    tier: Tier = Tier.NAMED
    steps: tuple[str, ...] = ()
    needs_version: bool = False
    stages: str = ""


def title_of(regression: Regression) -> str:
    """The title of a row: what broke, since which release, and the log's own version.

    >>> row = Regression(package="torch", broken="2.3", what="w", cure="", sources=(), pattern="", sample="")
    >>> title_of(row)
    'w; a known regression of torch 2.3 (the log shows {torch|no version; check yours first})'
    """
    fact = READ.get(regression.package)
    log = f"the log shows {{{fact}|no version; check yours first}}" if fact else "if that is what is installed"
    return f"{regression.what}; a known regression of {regression.package} {regression.broken} ({log})"


def signature_of(regression: Regression) -> Signature:
    """The wording of a row."""
    return Signature(
        words=regression.words,
        parts=regression.parts,
        pattern=regression.pattern,
        after=regression.after,
        tier=regression.tier,
        sample=regression.sample,
        title=title_of(regression),
        fix=f"{regression.cure} (see {GITHUB}{regression.sources[0]})",
        steps=regression.steps,
    )


def _rules(topics: Mapping[str, Table]) -> Iterator[Rule]:
    """The rules of all topics; where two could explain a line, the first of them does."""
    for name, topic in topics.items():
        more = tuple(map(signature_of, _regressions(topic))) if name == REGRESSION_TOPIC else ()
        for table in topic["rule"]:
            yield Rule(
                id=table["id"],
                stage=Stage(table["stage"]),
                title=table["title"],
                fix=table["fix"],
                signatures=(*map(_signature, table.get("wording", ())), *more),
                steps=tuple(table.get("steps", ())),
                cases=tuple(Case(**{**case, "steps": _steps(case)}) for case in table.get("case", ())),
                explained_by=tuple(table.get("explained_by", ())),
                general=table.get("general", False),
            )


def _signature(table: Table) -> Signature:
    return Signature(**{**table, "tier": _tier(table), "steps": _steps(table)})


def _regressions(topic: Table) -> Iterator[Regression]:
    for row in topic["regression"]:
        yield Regression(
            **{**row, "tier": _tier(row), "sources": tuple(row["sources"]), "steps": tuple(row.get("steps", ()))}
        )


def _steps(table: Table) -> tuple[str, ...] | None:
    return tuple(table["steps"]) if "steps" in table else None


def _tier(table: Table) -> Tier:
    return Tier[table.get("tier", "named").upper()]


TOPICS = log_table()

RULES = {rule.id: rule for rule in _rules(TOPICS)}

REGRESSIONS = tuple(_regressions(TOPICS[REGRESSION_TOPIC]))

REGRESSION_OF = {signature_of(regression): regression for regression in REGRESSIONS}


# Lines that show how a log went: it failed, it ended well, a compile began. They name no cause.
class Event(enum.Enum):
    """What a mark shows."""

    FAILED = "failed"
    ENDED_WELL = "ended well"
    EXITED_ZERO = "exited with zero"
    ASKED_FOR_STATUS = "asked for status"
    NCCL_WARNED = "nccl warned"
    LAST_ERROR = "last error"
    COMPLAINED = "complained"
    TRACEBACK = "traceback"
    EXCEPTION = "exception"
    WAITING = "waiting"
    COMPILING = "compiling"
    LOADED = "loaded"
    CANCELLED = "cancelled"
    NO_GPU = "no gpu"
    WINDOWS = "windows"
    COMPILER_ERROR = "compiler error"
    GPU_FAULT = "gpu fault"
    CHAINED = "chained"
    IGNORED = "ignored"
    USAGE = "usage"
    ERROR_FILE = "error file"
    CRASHED = "crashed"
    EXITED = "exited"
    NO_NUMBER = "no number"
    MISSING = "missing"
    WORLD = "world"
    BUILDING = "building"
    STOPPED = "stopped"
    WATCHDOG = "watchdog"
    RECOVERED = "recovered"
    WORK = "work"
    SUITE_BEGAN = "suite began"
    SUITE_CAPTURED = "suite captured"
    SUITE_PASSED = "suite passed"
    SUITE_FAILED = "suite failed"

    __hash__ = object.__hash__  # why: an event is looked up for each mark of each line, and this one is in C


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A pattern of lines that show an event; ``words``, ``parts`` and ``pattern`` as in Signature.

    ``first_hand``: it shows nothing where a warning or a sentence has it. ``after``: must be found in the lines just above.
    """

    event: Event
    words: str
    pattern: str
    parts: str = ""
    first_hand: bool = False
    after: str = ""


MARKS = tuple(Mark(**{**mark, "event": Event(mark["event"])}) for mark in forms("marks")["mark"])


@dataclass(frozen=True, kw_only=True)
class Clue:
    """How to find a fact: ``words`` and ``parts`` as in Signature; the first group is the value.

    ``last``: the last line with it counts; ``every``: all values of a line count.
    """

    name: str
    words: str
    pattern: str
    parts: str = ""
    last: bool = False
    every: bool = False


CLUES = tuple(Clue(**clue) for clue in forms("facts")["clue"])
