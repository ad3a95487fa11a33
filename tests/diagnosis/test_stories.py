"""Kind x rank x position x style: the rank's own failure is named first, whatever the other ranks print."""

from __future__ import annotations

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.models import LogOutcome
from tests.diagnosis.reading import diagnose
from tests.diagnosis.stories import KINDS, STYLES, WORLD, Kind, log_of
from tests.each import each

CASES = [(rank, position, style) for rank in range(WORLD) for position in ("before", "after") for style in STYLES]


def wrong(kind: Kind, rank: int, position: str, style: str) -> str:
    """What is wrong with the verdict on a log; "" if nothing."""
    diagnosis = diagnose(log_of(kind, rank, position, style))
    errors = [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]
    title = errors[0].title if errors else "no error"
    missing = [
        word for word in kind.words if word.lower() not in f"{title} {errors[0].evidence if errors else ''}".lower()
    ]
    if diagnosis.outcome is LogOutcome.HEALTHY or missing or len(errors) > 1:
        return f"rank {rank} {position} {style}: {[error.title for error in errors]}"
    if "build" in title or "compile" in title:
        return f"rank {rank} {position} {style}: a build is blamed: {title}"
    places = (f"rank {rank}: ", f"train-worker-{rank}/pytorch: ")
    return "" if title.startswith(places) else f"rank {rank} {position} {style}: another rank: {title}"


@each("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_own_failure_of_a_rank_is_named_first_in_a_sample(kind: Kind) -> None:
    sample = CASES[KINDS.index(kind) % 19 :: 19]

    assert [text for case in sample if (text := wrong(kind, *case))] == []


@pytest.mark.slow
@each("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_own_failure_of_a_rank_is_named_first(kind: Kind) -> None:
    found = [wrong(kind, *case) for case in CASES]

    assert [text for text in found if text] == []
