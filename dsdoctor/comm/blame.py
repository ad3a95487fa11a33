"""Whose contribution to a result was wrong: repeats a wrong step with all ranks, with inputs that tell them apart.

Every rank of the group calls ``follow_up`` for the same step, also one that saw nothing wrong. Whose, told by data alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dsdoctor.comm.calls import all_gather_list, of_all
from dsdoctor.comm.collectives import Step
from dsdoctor.comm.exchange import compare, lacking
from dsdoctor.comm.nouns import Exchange, Group, Wrong
from dsdoctor.comm.values import Call, Reduction, inverse_sets

MOST_PLACES = 4
"""Wrong places of a result that are looked into: each may have another cause."""


def follow_up(group: Group, step: Step, first: Exchange) -> Exchange:
    """Do a wrong step again. ``whose`` of the answer is empty where nothing came again or the data does not tell.

    A collective that only moves data shows by itself whose it is. For a reduction two things are tried:

    - The same inputs are gathered: a rank whose part arrives wrong is named.
    - The reduction is repeated with some ranks' inputs inverted: those with a binary digit of their number set, then the others,
      digit after digit. The error changes exactly when the culprit is among the inverted, which spells its number. An
      error that changes with both halves, or with neither, is nobody's own contribution, and no one is named.
    """
    call = step.call(group)
    errors = _errors(step, call)
    if step.collective.reduction is None:
        again = _told(step, call)
        whose = {*(first.wrong.whose if first.wrong else ()), *(again.whose if again else ())}
        return _with(first, again, whose)
    gathered = _gathered(step, call)
    spelt = _spelt(step, group, errors)
    again = _told(step, call)
    return _with(first, again if again is not None else None, spelt or gathered)
