"""The rules of known failures in logs, as the book has them, and known regressions: rules that hold for some releases only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsdoctor.diagnosis.models import Case, Rule, Signature, Stage, Tier
from dsdoctor.rules.store import Table, log_table

GITHUB = "https://github.com/"

REGRESSION_TOPIC = "regressions"

READ = {name: name for name in ("deepspeed", "torch", "transformers", "accelerate")}
"""The packages whose version a log is read for, with the name of that fact."""


@dataclass(frozen=True, kw_only=True)
class Regression:
    """One fault of a release. ``broken``: the releases, as a sentence says them. ``cure``: the release that mends it,
    or the last good.

    ``words``, ``pattern``, ``after``, ``tier`` and ``sample`` as in Signature. ``needs_version``: its symptom has other reasons
    too, so it counts only where the log names a version that has the fault. ``stages``: the ZeRO stages that have it, all if "".
    """

    package: str
    broken: str
    what: str
    cure: str
    sources: tuple[str, ...]
    pattern: str
    sample: str
    words: str = ""
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
    'w; a known regression of torch 2.3 (the log: {torch|no version; check yours first})'
    """
    fact = READ.get(regression.package)
    log = f"the log: {{{fact}|no version; check yours first}}" if fact else "if that is what is installed"
    return f"{regression.what}; a known regression of {regression.package} {regression.broken} ({log})"


def signature_of(regression: Regression) -> Signature:
    """The wording of a row."""
    return Signature(
        words=regression.words,
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
