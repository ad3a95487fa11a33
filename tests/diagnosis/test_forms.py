"""What lines of logs are known by beside rules: each form is found in its sample, each name is one of the code."""

import re

from dsdoctor.diagnosis.catalogue import CLUES, MARKS, Event
from dsdoctor.diagnosis.facts import INSTALL_OPS
from dsdoctor.diagnosis.models import Facts
from dsdoctor.rules.store import FORMS, files_of, forms, order, parse, read
from dsdoctor.rules.words import derived_words

FILES = {file: parse(read(file)) for file in files_of(FORMS)}


def test_every_form_is_found_in_its_sample() -> None:
    entries = [
        (topic, form)
        for topic, table in zip(order()[FORMS], FILES.values(), strict=True)
        for form in table.get("form", ())
    ]
    lost = [
        form["name"] for topic, form in entries if not re.search(forms(topic)["form"][form["name"]], form["sample"])
    ]

    assert len(entries) > 15
    assert lost == []


def test_every_event_has_a_mark_or_follows_from_others() -> None:
    assert {mark.event for mark in MARKS} == set(Event)


def test_every_clue_is_of_a_fact() -> None:
    assert {clue.name for clue in CLUES} - set(vars(Facts())) == {INSTALL_OPS}


def test_words_stand_by_hand_only_where_others_are_derived() -> None:
    entries = [one for table in FILES.values() for kind in ("mark", "clue") for one in table.get(kind, ())]
    whole = [one for topic in ("marks", "facts") for kind in ("mark", "clue") for one in forms(topic).get(kind, ())]
    by_hand = [
        one["words"]
        for one, made in zip(entries, whole, strict=True)
        if "words" in one and made["words"] == derived_words(made["pattern"])
    ]

    assert by_hand == []
    assert all(one["words"] for one in whole)
