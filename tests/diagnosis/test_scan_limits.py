"""The limits that keep a hostile log cheap lose nothing of a real one."""

import pytest

from dsdoctor.diagnosis.above import ABOVE, Above
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.index import INDEX
from dsdoctor.diagnosis.scan import A_COMPILE

ALL_WORDS = " ".join(sorted(word.decode() for word in INDEX.words if word != A_COMPILE))
CAUSE = "x.h:6:10: fatal error: cusparse.h: No such file or directory"


def test_a_line_above_is_found_as_long_as_it_is_one_of_the_last() -> None:
    above = Above()
    above.remember([b"setup.py"])
    found = []
    for _ in range(ABOVE + 1):
        found.append(above.has(r"setup\.py"))
        above.remember([b"other"])

    assert found == [True] * ABOVE + [False]


def test_a_line_above_is_found_again_after_it_was_lost() -> None:
    above = Above()
    above.remember([b"other"] * 100)
    assert not above.has("setup")

    above.remember([b"setup", *[b"other"] * 10])

    assert above.has("setup")


@pytest.mark.slow
def test_lines_above_are_still_searched_after_very_many_in_vain() -> None:
    log = [line for _ in range(2500) for line in ("IndexError: list index out of range", *["training"] * 15)]

    last = [*log, "    arch_list[-1] += '+PTX'", "IndexError: list index out of range"]

    assert [finding.rule for finding in diagnose(last).findings] == ["arch-list-empty"]


def test_the_head_and_the_tail_of_a_line_with_the_words_of_everything_are_read() -> None:
    for line in (f"{CAUSE} {ALL_WORDS}", f"{ALL_WORDS} {CAUSE}"):
        assert "cuda-header-missing" in {finding.rule for finding in diagnose([line]).findings}


def test_a_wrapped_exception_is_read_to_its_end() -> None:
    log = [
        "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile",
        "PyTorch (12.1). Please",
    ]

    assert [finding.rule for finding in diagnose(log).findings] == ["cuda-torch-mismatch"]
