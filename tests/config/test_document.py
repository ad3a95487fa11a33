"""Texts that are no configuration, made by chance and by design: each ends in one error of ours, and none is read for ever."""

import random

import pytest

from dsdoctor.config.answer import Correction
from dsdoctor.config.document import correct, parse
from dsdoctor.core.errors import UsageError
from tests.config.recorded import verdicts

PARTS = (
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\n",
    " ",
    "'",
    '"',
    "'''",
    "#",
    "//",
    "/*",
    "*/",
    "\\",
    "\\u00e9",
    "\\ud800",
    "\t",
    "\ufeff",
    "true",
    "null",
    "NaN",
    "Infinity",
    "1e999",
    "-1e999",
    "1.5e3",
    "0x10",
    "-",
    "12",
    "9" * 5000,
    "1e-999",
    "auto",
    "stage",
    "zero_optimization",
    "fp16",
    '"train_batch_size": 8',
    '"zero_optimization": {"stage": 3}',
    "a: b",
    '"x": [1, 2]',
    "'single': 1",
)


def fuzz_document(choice: random.Random) -> bool:
    """Read a text by chance, judge what it says and correct it; whether it was read."""
    text = "".join(choice.choices(PARTS, k=choice.randint(1, 30)))
    if choice.random() < 0.7:
        text = "{" + text + "}"
    try:
        read = parse(text, "x")
    except UsageError:
        return False
    read.by_json()
    verdicts(read.config)
    correct(
        text, read.config, [Correction(path=("stage",), to=("zero_optimization", "stage")), Correction(path=("a",))]
    )
    return True


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1.0e400"])
def test_a_number_at_which_hjson_fails_is_named(number: str) -> None:
    with pytest.raises(UsageError, match=f"x is not a DeepSpeed configuration: {number} is too large for a number"):
        parse(f'{{"a": {number}}}', "x")


def test_a_large_text_that_is_none_is_refused_at_once() -> None:
    """A pattern that looked for what is wrong did not end for the first of these."""
    for text in (
        "{" + ": " * 30_000,
        "{" + "a:b," * 15_000 + "'",
        "{" + "a:1\n" * 15_000 + "}",
    ):
        with pytest.raises(UsageError):
            parse(text, "x")


@pytest.mark.parametrize(
    "count", [pytest.param(60, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.exhaustive)]
)
def test_texts_by_chance_end_in_a_verdict_or_in_one_error(count: int) -> None:
    choice = random.Random(count)

    assert 0 < sum(fuzz_document(choice) for _ in range(count)) < count
