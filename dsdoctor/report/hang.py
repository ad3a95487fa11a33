"""A verdict on a run in which nothing moves -> lines."""

from collections.abc import Iterator

from dsdoctor.hang.models import Incident, Verdict
from dsdoctor.hang.stacks import ranks_words
from dsdoctor.report.terminal import finding_lines


def hang_lines(incident: Incident, verdict: Verdict) -> Iterator[str]:
    """What is the matter, each cause with its evidence, then the stacks of all ranks, equal ones together."""
    yield headline(incident)
    yield from finding_lines(verdict.findings)
    # of ranks that have ended there are only old ones
    if verdict.stacks and not incident.first_ended:
        yield "the stacks, equal ones together:"
        yield from (f"    {line}" for line in verdict.stacks)


def headline(incident: Incident) -> str:
    """One line: since when nothing has moved."""
    heard = len(incident.ranks)
    of = f"{heard} of {incident.world} ranks were heard of" if heard < incident.world else f"{incident.world} ranks"
    if incident.asked:
        return f"somebody asked where the ranks are ({of}): the last movement was {incident.still:.0f} s ago"
    if incident.first_ended:
        return f"{ranks_words(incident.first_ended)} ended before the others ({of})"
    return f"nothing has moved for {incident.still:.0f} s ({of})"
