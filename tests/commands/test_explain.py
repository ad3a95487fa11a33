"""The manual pages: every rule has one, in four parts."""

import pytest

from dsdoctor.commands.explain import every_rule, pages


@pytest.mark.parametrize("rule", every_rule())
def test_a_page_says_what_it_means_why_it_matters_how_to_fix_it_and_since_when(rule: str) -> None:
    found = list(pages(rule))

    assert found
    for where, page in found:
        assert len(page.means) > 20, where
        assert len(page.why) > 20, where
        assert len(page.fix) > 15, where
        assert page.since.count(".") == 1, where
