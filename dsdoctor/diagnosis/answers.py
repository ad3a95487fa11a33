"""An exception that no rule of the logs knows -> the general answer to its kind, by its class, its message and its owner.

The answers are the rules of ``rules/logs/general.toml``: what such an exception means, and whether the project that raised it,
the code that called that project, or the user's own values have to change. They are asked last, and only of the failure that
was chosen as the cause.
"""

import re

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.failures import Failure
from dsdoctor.diagnosis.models import Facts, Hit, Rule
from dsdoctor.diagnosis.owner import PYTHON

WORDS = 200
"""So many letters of an exception's message are told."""
GENERAL = tuple(rule for rule in RULES.values() if rule.general)


def answer_to(failure: Failure, facts: Facts) -> Hit | None:
    """The first general rule with a wording for an exception of this owner; None where its kind says nothing by itself.

    >>> hit = answer_to(Failure(line=9, text="KeyError: 'images'"), Facts())
    >>> hit.rule.id, hit.groups["name"]
    ('key-missing', 'images')
    """
    places = _places(failure, facts)
    for rule in GENERAL:
        if hit := _hit(rule, failure, places):
            return hit
    return None


def _hit(rule: Rule, failure: Failure, places: dict[str, str]) -> Hit | None:
    for signature in rule.signatures:
        if signature.owner == "project" and "project" not in places:
            continue
        found = re.search(signature.pattern, failure.text)
        if found and not (signature.unless and re.search(signature.unless, failure.text)):
            groups = {name: value.strip()[:160] for name, value in found.groupdict().items() if value}
            return Hit(
                rule=rule,
                signature=signature,
                line=failure.line,
                text=failure.text,
                groups={**places, **groups},
                speaker=failure.speaker,
            )
    return None


def _places(failure: Failure, facts: Facts) -> dict[str, str]:
    """``project``: who raised it, with its ``version`` where the log has it; ``caller``: the nearest code of somebody else above.

    ``words``: the exception's own. ``place`` and ``at``: the innermost line of the user's own code, else of the project that raised
    it; ``yours``: only the former.
    """
    raiser = failure.last_of_a_project
    if raiser is None:
        return {"words": failure.text[:WORDS]}
    above = (one for one in reversed(failure.frames) if not one.is_relay and one.owner not in {raiser.owner, PYTHON})
    caller = next(above, None)
    known = getattr(facts, raiser.owner.lower(), None)
    places = {
        "words": failure.text[:WORDS],
        "at": f", at {failure.frame}" if failure.frame else "",
        "project": raiser.owner if raiser.owner != PYTHON else "",
        "version": f" {known}" if isinstance(known, str) else "",
        "caller": (caller.owner or "your code") if caller else "",
        "place": failure.frame.place if failure.frame else "",
        "yours": failure.frame.place if failure.frame and failure.frame.own else "",
    }
    return {name: value for name, value in places.items() if value}
