"""A verdict on a run in which nothing moves -> lines."""

import re
from collections.abc import Iterator

from dsdoctor.hang.models import PROCESSES, RECORDERS, Incident, Verdict
from dsdoctor.hang.stacks import main_stack, ranks_words
from dsdoctor.ui.terminal import VerdictLine, finding_lines

MOST = 8
PACKAGES = re.compile(r"^(\s*)/\S*/(?:site|dist)-packages/")


def hang_lines(incident: Incident, verdict: Verdict) -> Iterator[str]:
    """What is the matter, each cause with its evidence, then the stacks of all ranks, equal ones together."""
    yield VerdictLine(headline(incident))
    if not verdict.findings and incident.source == PROCESSES:
        yield from _what_works(incident)
    yield from finding_lines(verdict.findings)
    # of ranks that have ended there are only old ones
    if verdict.stacks and not incident.first_ended and any(map(main_stack, incident.ranks)):
        yield "the stacks, equal ones together:"
        yield from (f"    {_short(line)}" for line in verdict.stacks)


def _short(line: str) -> str:
    """A line of a stack, with a package's file as it is imported.

    >>> _short("    /opt/venv/lib/python3.11/site-packages/deepspeed/comm/comm.py:294 in reduce_scatter_fn")
    '    deepspeed/comm/comm.py:294 in reduce_scatter_fn'
    """
    return PACKAGES.sub(r"\1", line)


def _what_works(incident: Incident) -> Iterator[str]:
    """Of running processes in which nothing hangs: which of them work."""
    works = [view for view in incident.ranks if view.activity]
    yield f"✓ {ranks_words(view.rank for view in works)} {'works' if len(works) == 1 else 'work'}: nothing hangs as far as was seen"
    yield from (f"    rank {view.rank}: {view.activity}" for view in works[:MOST])


def headline(incident: Incident) -> str:
    """One line: since when nothing has moved."""
    heard = len(incident.ranks)
    if incident.source == PROCESSES:
        some = f"{heard} of {incident.world} ranks" if heard < incident.world else f"{heard} rank{'s' * (heard != 1)}"
        return f"two looks at running processes, {incident.still:.0f} s apart ({some})"
    of = f"{heard} of {incident.world} ranks were heard of" if heard < incident.world else f"{incident.world} ranks"
    if incident.source == RECORDERS:
        return f"what torch's flight recorders hold ({of})"
    if incident.asked:
        return f"somebody asked where the ranks are ({of}): the last movement was {incident.still:.0f} s ago"
    if incident.first_ended:
        return f"{ranks_words(incident.first_ended)} ended before the others ({of})"
    return f"nothing has moved for {incident.still:.0f} s ({of})"
