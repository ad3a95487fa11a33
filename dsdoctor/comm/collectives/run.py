"""Runs the steps of a test, one after the other on every rank: steps -> what came out on this rank."""

import time
from collections.abc import Sequence

from dsdoctor.comm.collectives.catalogue import ExchangeStep
from dsdoctor.comm.collectives.exchange import Progress, _Notes, _skipped, exchange
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange


def run_steps(
    group: RankGroup, steps: Sequence[ExchangeStep], progress: Progress, budget: float | None = None
) -> tuple[Exchange, ...]:
    """Exchange and compare; if anything was wrong on any rank, find out with all ranks whose data it was.

    ``progress`` hears of each before it begins. With ``budget``, rank 0 decides by its clock whether there is time for
    the next large step; those left out are skipped with that reason. Raises what torch raises where communication breaks.
    """
    from dsdoctor.comm.collectives.blame import follow_up

    notes, until = _Notes(group), time.monotonic() + (budget or 0)
    seen: list[Exchange] = []
    for number, step in enumerate(steps, 1):
        if budget is not None and step.large and not notes.go(number, time.monotonic() < until):
            seen.append(_skipped(step, f"the {budget:g} s for the exchanges were used up"))
            continue
        progress.tell(number, str(step))
        seen.append(exchange(group, step))
        if reason := seen[-1].skipped:
            progress.skip(number, reason)
    wrong = [number for number, exchanged in enumerate(seen) if exchanged.wrong is not None]
    for turn, number in enumerate(notes.all_wrong(wrong, steps), len(steps) + 1):
        progress.tell(turn, f"{steps[number]}, again, to see whose data is wrong")
        seen[number] = follow_up(group, steps[number], seen[number])
    return tuple(seen)
