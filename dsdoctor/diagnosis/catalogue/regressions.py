"""The rule of known regressions: one wording for each row of the table, and whether a log's versions contradict a row."""

import re

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.catalogue.regression import GITHUB, Regression
from dsdoctor.diagnosis.catalogue.regressions_of_deepspeed import OF_DEEPSPEED
from dsdoctor.diagnosis.catalogue.regressions_of_others import OF_OTHERS
from dsdoctor.diagnosis.models import Facts, Hit, Rule, Signature, Stage

REGRESSIONS = (*OF_DEEPSPEED, *OF_OTHERS)

READ = {name: name for name in ("deepspeed", "torch", "transformers", "accelerate")}
"""The packages whose version a log is read for, with the name of that fact."""


def title_of(regression: Regression) -> str:
    """The title of a row: what broke, since which release, and the log's own version.

    >>> title_of(OF_OTHERS[1])[-69:]
    '(the log: {transformers|no version, so this holds if it is that one})'
    """
    fact = READ.get(regression.package)
    log = f"the log: {{{fact}|no version, so this holds if it is that one}}" if fact else "if that is what is installed"
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


WORDINGS = {signature_of(regression): regression for regression in REGRESSIONS}


def contradicted(hit: Hit, facts: Facts) -> bool:
    """Whether the log names a version that does not have this fault, or names none where only the version tells."""
    regression = WORDINGS.get(hit.signature)
    if regression is None:
        return False
    if regression.stages and facts.zero_stage and facts.zero_stage not in regression.stages:
        return True
    version = getattr(facts, READ[regression.package]) if regression.package in READ else None
    if not version:
        return regression.needs_version
    here = _numbers(version)
    too_old = bool(regression.first) and here < _numbers(regression.first)
    return too_old or (bool(regression.last) and here > _numbers(regression.last))


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version.

    >>> _numbers("0.16.5+cu121")
    (0, 16, 5)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


KNOWN_REGRESSION = Rule(
    id="known-regression",
    stage=Stage.RUN,
    title="a known regression of an installed release",
    fix="take the release that mends it, or the last one that works",
    steps=(step("python -m pip list"),),
    manual="""This message is known from public threads, where a release of a package brought it.

dsdoctor has a table of such releases: the message, the release that broke, the one that mends it, and the thread. Where
the log names a version that does not have the fault, the row is not used. Where it names none, the title says "if".

Why it matters: The training script is right, and looking for a fault in it is lost time.""",
    signatures=tuple(WORDINGS),
)

RULES = (KNOWN_REGRESSION,)
