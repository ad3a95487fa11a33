"""A verdict on a hang -> lines for a terminal: the headline, each cause with its evidence, the stacks."""

import re
from collections.abc import Iterator

from dsdoctor.hang.models import PROCESSES, RECORDERS, Incident, Verdict
from dsdoctor.hang.stacks import main_stack, ranks_words
from dsdoctor.ui.terminal import VerdictLine, finding_lines

MAX_SHOWN_RANKS = 8
PACKAGES = re.compile(r"^(\s*)/\S*/(?:site|dist)-packages/")


def hang_lines(incident: Incident, verdict: Verdict) -> Iterator[str]:
    """What is the matter, each cause with its evidence, then the stacks of all ranks, equal ones together."""
    yield VerdictLine(headline(incident))
    if not verdict.findings and incident.source == PROCESSES:
        yield from _what_works(incident)
    yield from finding_lines(verdict.findings)
    # of ranks that have ended there are only old ones
    if verdict.stacks and not incident.first_ended and any(map(main_stack, incident.ranks)):
        yield "stacks, grouped:"
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
    yield f"✓ {ranks_words(view.rank for view in works)} {'is' if len(works) == 1 else 'are'} working; no hang detected"
    yield from (f"    rank {view.rank}: {view.activity}" for view in works[:MAX_SHOWN_RANKS])


def headline(incident: Incident) -> str:
    """One line: since when nothing has moved."""
    heard = len(incident.ranks)
    if incident.source == PROCESSES:
        some = f"{heard} of {incident.world} ranks" if heard < incident.world else f"{heard} rank{'s' * (heard != 1)}"
        return f"running processes, sampled twice {incident.still:.0f} s apart ({some})"
    of = f"{heard} of {incident.world} ranks reported" if heard < incident.world else f"{incident.world} ranks"
    if incident.source == RECORDERS:
        return f"from torch's flight recorders ({of})"
    if incident.asked:
        return f"report on request ({of}): last progress {incident.still:.0f} s ago"
    if incident.first_ended:
        return f"{ranks_words(incident.first_ended)} exited before the others ({of})"
    return f"no progress for {incident.still:.0f} s ({of})"
