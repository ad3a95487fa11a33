"""Corrections change what they must, in JSON and in Hjson, and leave the rest of the text alone."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdoctor.config.answer import Correction
from dsdoctor.config.document import apply, correct, members, parse
from dsdoctor.core.errors import UsageError

TEXT = """{
  // sizes
  "train_batch_size": 32, # all
  stge: 2
  "zero_optimisation": {
    "stage": "2",  /* two */
    "x": [1, {"stage": 3}]
  },
  'single': 'a: b',
  word: no quotes: here
  "last": {"a": 1, "b": '''text
  more'''}
}
"""


def test_places_are_where_things_stand() -> None:
    found = {member.path: TEXT[member.value : member.end] for member in members(TEXT)}

    assert found[("train_batch_size",)] == "32"
    assert found[("zero_optimisation", "stage")] == '"2"'
    assert found[("word",)] == "no quotes: here"
    assert found[("last", "b")].endswith("more'''")


@pytest.mark.parametrize(
    ("correction", "line"),
    [
        (Correction(path=("stge",), to=("stage",)), "  stage: 2"),
        (Correction(path=("zero_optimisation", "stage"), value="2"), '    "stage": 2,  /* two */'),
        (Correction(path=("zero_optimisation",), to=("zero_optimization",)), '  "zero_optimization": {'),
        (Correction(path=("stge",), to=("zero_optimisation", "stge")), '    "stge": 2,'),
        (Correction(path=("stge",), to=("zero", "stage")), '  "zero": {"stage": 2},'),
        (Correction(path=("new",), value="true"), '  "new": true,'),
        (Correction(path=("last", "b")), '  "last": {"a": 1}'),
    ],
)
def test_one_line_changes(correction: Correction, line: str) -> None:
    made = correct(TEXT, parse(TEXT, "").config, [correction])

    assert made.in_place
    assert line in made.text.splitlines()
    assert "// sizes" in made.text


def test_nothing_is_overwritten() -> None:
    config = {"stge": 1, "stage": 2}
    made = correct(json.dumps(config), config, [Correction(path=("stge",), to=("stage",))])

    assert (parse(made.text, "").config, made.made) == (config, ())


def test_for_those_who_read_json_only_comments_go() -> None:
    made = correct(TEXT, parse(TEXT, "").config, [], plain_json=True)

    assert not made.in_place
    assert json.loads(made.text) == parse(TEXT, "").config


NAMES = st.sampled_from(["a", "b", "stage", "fp16", "x y", "ü"])
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), st.text(max_size=4), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=10)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_the_corrected_text_says_what_was_meant(config: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(config, indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=False)
    every = [member.path for member in members(text)]
    path, to = data.draw(st.sampled_from(every)), data.draw(st.lists(NAMES, min_size=1, max_size=2))
    correction = data.draw(
        st.sampled_from(
            [Correction(path=path), Correction(path=path, to=tuple(to)), Correction(path=path, value='"v"')]
        )
    )
    wanted = json.loads(json.dumps(config))
    apply(wanted, correction)

    assert parse(correct(text, config, [correction]).text, "").config == wanted


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1, "a": 2}', "5", '{"a": }', "{" * 5000])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, "x")


def test_a_word_without_quotes_that_swallows_a_brace_is_explained() -> None:
    with pytest.raises(UsageError) as refused:
        parse("{optimizer: {type: AdamW, params: {lr: 1}}\n}", "x")

    assert "to the end of its line" in refused.value.hint
    with pytest.raises(UsageError) as refused:
        parse('{"a": [1, 2}', "x")
    assert refused.value.hint == "name a ds_config.json"
