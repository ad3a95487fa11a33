"""Finds the ranks whose contribution to a result was wrong: repeats the wrong step with inputs that distinguish the ranks.

Every rank of the group calls ``follow_up`` for the same step, also a rank that saw nothing wrong.
"""

from dataclasses import replace

from dsdoctor.comm.collectives.calls import all_gather, of_all
from dsdoctor.comm.collectives.catalogue import ExchangeStep
from dsdoctor.comm.collectives.exchange import compare, exchange
from dsdoctor.comm.collectives.values import inverse_sets
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange

MOST_PLACES = 4
"""Wrong places of a result that are examined: each may have another cause."""

MOST_GATHERED = 1 << 22
"""Elements that are gathered to see whose arrive wrong."""

MOST_SEEN = 1000
"""Errors of one repeat that are compared with those of the others."""

Errors = dict[int, float]
"""Place in the result -> how far from right it is; nothing where it is right."""


def follow_up(group: RankGroup, step: ExchangeStep, first: Exchange) -> Exchange:
    """Do a wrong step again. ``whose`` of the answer is empty where the error did not come again or the data does not show it.

    A collective that only moves data shows the sender by itself. For a reduction two things are tried:

    - The same inputs are gathered: a rank whose part arrives wrong is named.
    - The reduction is repeated with some ranks' inputs inverted: those with a binary digit of their number set, then the others,
      digit after digit. The error changes exactly when the faulty rank is among the inverted ones, which gives its number
      digit by digit. An error that changes with both halves, or with neither, is not one rank's contribution: none is named.
    """
    if step.collective.reduction is None:
        repeated = exchange(group, step)
        again = repeated.wrong is not None
        whose = {rank for seen in (first, repeated) if seen.wrong for rank in seen.wrong.whose}
    else:
        errors = _errors(group, step)
        gathered = _gathered(group, step)
        spelt = _spelt(group, step, errors)
        again = bool(errors or gathered)
        whose = spelt or gathered or set(first.wrong.whose if first.wrong else ())
    if first.wrong is None:
        return first
    return replace(first, wrong=replace(first.wrong, whose=tuple(sorted(whose)), again=again))


def _errors(group: RankGroup, step: ExchangeStep, inverted: frozenset[int] = frozenset()) -> Errors:
    """The errors of the result when some ranks send the inverse of their values."""
    call = step.call(group, inverted)
    got, want = step.collective.run(call, call.mine(step.collective.length(call))), step.collective.expect(call)
    if got is None or want is None or compare(got, want, call) is None:
        return {}
    if call.dtype != "int64":
        got, want = got.double(), replace(want, values=want.values.double())
    places = (got != want.values).nonzero().flatten().tolist()
    return {place: (got[place] - want.values[place]).item() for place in places[:MOST_SEEN]}


def _gathered(group: RankGroup, step: ExchangeStep) -> set[int]:
    """The ranks whose input arrives wrong when it is only moved."""
    call = step.call(group)
    call = replace(call, elements=max(min(step.collective.length(call), MOST_GATHERED // group.world), 1))
    wrong = compare(all_gather(call, call.mine(call.elements)), of_all(call), call)
    return set(wrong.whose) if wrong else set()


def _spelt(group: RankGroup, step: ExchangeStep, errors: Errors) -> set[int]:
    """The ranks whose inversion changes the errors; every rank repeats all, whatever it saw itself."""
    places = sorted(errors)[:MOST_PLACES]
    numbers: dict[int, int | None] = dict.fromkeys(places, 0)
    for digit, (ones, zeros) in enumerate(inverse_sets(group.world)):
        with_ones, with_zeros = _errors(group, step, ones), _errors(group, step, zeros)
        for place in places:
            digit_set = _changed(errors[place], with_ones.get(place, 0))
            digit_unset = _changed(errors[place], with_zeros.get(place, 0))
            number = numbers[place]
            numbers[place] = None if number is None or digit_set == digit_unset else number | digit_set << digit
    return {number for number in numbers.values() if number is not None and number < group.world}


def _changed(before: float, after: float) -> bool:
    """Whether an error is another one: a wrong bit of an inverted number errs to the other side, give or take a rounding."""
    return abs(after - before) > abs(before) / 2
