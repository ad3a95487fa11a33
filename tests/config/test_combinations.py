"""Stage x offload x type x optimizer, and each flag at each stage: what `config` says is what an engine does."""

import pytest

from tests.config.combinations import combinations, outcomes

pytestmark = pytest.mark.launch  # needs DeepSpeed
EVERY = 59
"""Each fifty-ninth one is initialized for real here; ``benchmarks/config.py --combinations`` tries them all."""


def test_no_refusal_goes_unseen_and_no_training_is_called_refused() -> None:
    cases = list(combinations())
    found = outcomes(cases[7::EVERY])

    assert len(cases) >= 900
    assert {"trains", "refused, named"} <= {each.verdict for each in found}
    assert [each for each in found if each.verdict in {"unseen", "alarm"}] == []
