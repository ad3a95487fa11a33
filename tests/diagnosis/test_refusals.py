"""Exceptions that a library raised on purpose: a family of sentences is understood, the others are told as what they are."""

from itertools import product

import pytest

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.diagnosis.reading import diagnose
from tests.each import each

START = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 41, in <module>', "    main()"]
PLACES = (
    ("/v/lib/python3.11/site-packages/deepspeed/runtime/engine.py", "DeepSpeed", "runtime/engine.py:9 step"),
    ("/home/u/DeepSpeed/deepspeed/runtime/zero/stage3.py", "DeepSpeed", "runtime/zero/stage3.py:9 step"),
    ("/v/lib/python3.11/dist-packages/swift/trainers/mixin.py", "swift", "trainers/mixin.py:9 step"),
    ("C:\\venv\\Lib\\site-packages\\deepspeed\\runtime\\lr_schedules.py", "DeepSpeed", "lr_schedules.py:9 step"),
)


def raised(path: str, source: str, *end: str) -> Diagnosis:
    return diagnose([*START, f'  File "{path}", line 9, in step', f"    {source}", *end])


@each("place", PLACES)
def test_a_library_s_own_refusal_is_told_with_its_place_condition_and_names_and_stays_unexplained(
    place: tuple[str, str, str],
) -> None:
    path, package, where = place
    told = raised(path, "assert self.odd_size % args.odd_parts == 1, 'odd'", "AssertionError: odd `odd_mode`")

    first = told.findings[0]

    assert (told.outcome, first.rule) == (LogOutcome.UNEXPLAINED, "unexplained-failure")
    assert first.title.startswith(f"{package} rejects a value from your code, in training")
    assert first.fix and where in first.fix.text.replace("\\", "/")
    assert "it asks that self.odd_size % args.odd_parts == 1" in first.evidence
    assert "named in it: odd_mode, odd_size, odd_parts" in first.evidence
    assert first.fix and "odd_mode" in first.fix.text


def test_an_assertion_without_words_is_told_by_its_condition() -> None:
    told = raised(PLACES[0][0], "assert self.odd_gate.is_open", "AssertionError")

    assert "it asks that self.odd_gate.is_open" in told.findings[0].evidence


def test_what_only_happened_in_a_library_is_no_refusal() -> None:
    told = raised(PLACES[0][0], "x = self.odd_table[7]", "KeyError: 7")

    assert "rejects" not in told.findings[0].title


EXCEPTIONS = (
    "ValueError",
    "AssertionError",
    "NotImplementedError",
    "lightning.fabric.utilities.exceptions.MisconfigurationException",
)
CLASHES = (
    "alpha_mode is not supported with beta stage 3.",
    "`alpha` is not compatible with `beta`",
    "Beta plugins are currently not supported for alpha",
    "alpha and beta are mutually exclusive",
    "alpha cannot be used together with beta",
    "You can't use alpha and beta at the same time",
    "Alpha does not support beta",
    "alpha only supports beta-less models",
)
REQUESTS = (
    "Please use scripts/alpha_init.py to prepare the adapter",
    "alpha was found twice. Please remove `alpha` from the configuration",
    "You must specify alpha_size",
    "Do not set `alpha_size` in the DeepSpeed config as this will be set by the Trainer",
    "Alpha requires beta>=1.2 to be installed",
)


@each(("exception", "words"), list(product(EXCEPTIONS, CLASHES)))
def test_a_sentence_that_names_what_excludes_each_other_is_understood(exception: str, words: str) -> None:
    told = raised(PLACES[2][0], "raise", f"{exception}: {words}")

    assert told.findings[0].rule == "settings-exclude-each-other"
    assert words.rstrip(".")[:40] in told.findings[0].title


@each(("exception", "words"), list(product(EXCEPTIONS, REQUESTS)))
def test_a_sentence_that_asks_for_something_is_understood(exception: str, words: str) -> None:
    told = raised(PLACES[2][0], "raise", f"{exception}: {words}")

    assert told.findings[0].rule == "library-asks-for"


@each(
    "words",
    [
        "CUDA error: device is not supported for this operation",
        "shape '[2, 3]' is not compatible with input of size 7",
        "x.expired() INTERNAL ASSERT FAILED, please report a bug to PyTorch. Please make sure to use it",
        "This checkpoint is not supported with this version",
    ],
)
def test_faults_in_the_same_words_are_not_taken_for_settings(words: str) -> None:
    rules = {finding.rule for finding in raised(PLACES[2][0], "raise", f"RuntimeError: {words}").findings}

    assert not {"settings-exclude-each-other", "library-asks-for"} & rules


@pytest.mark.slow
def test_a_family_is_silent_on_a_line_that_a_rule_knows() -> None:
    families = {rule.id for rule in RULES.values() if rule.family}
    for rule in RULES.values():
        for signature in rule.signatures:
            found = {finding.rule for finding in diagnose(signature.sample.splitlines()).findings}

            assert rule.family or not families & found, signature.sample


@each(
    ("package", "source", "message", "told"),
    [
        (
            "accelerate",
            "raise ValueError(",
            "ValueError: A tracker called sheets was never stored in this Accelerator",
            True,
        ),
        ("peft", "assert rank > 0, (", "AssertionError: The rank of an adapter has to be above zero", True),
        ("deepspeed", "assert rank > 0, (", "AssertionError: The rank of an adapter has to be above zero", False),
        ("accelerate", "raise ValueError(", "ValueError: not so", False),
        (
            "accelerate",
            "raise RuntimeError(",
            "RuntimeError: A tracker called sheets was never stored in this Accelerator",
            False,
        ),
        ("torch", "raise ValueError(", "ValueError: The sizes of these two lists mismatch, 3 and 4", False),
        (
            "accelerate",
            "return trackers[name]",
            "ValueError: A tracker called sheets was never stored in this Accelerator",
            False,
        ),
    ],
)
def test_a_whole_sentence_by_which_a_library_refuses_is_told_as_the_cause(
    package: str, source: str, message: str, told: bool
) -> None:
    frames = [f'  File "/v/site-packages/{package}/tracking.py", line 40, in get', f"    {source}"]
    finding = diagnose(["Traceback (most recent call last):", *frames, message]).findings[0]

    assert (finding.rule == "library-asks-for") is told
    assert not told or (message.partition(": ")[2] in finding.title and package in finding.title)


@each(
    ("error", "in_title", "in_evidence"),
    [("ValueError: the data are empty", 1, 0), ("OSError: [Errno 28] No space left on device", 0, 1)],
)
def test_what_a_process_was_doing_is_said_once(error: str, in_title: int, in_evidence: int) -> None:
    frames = '  File "/w/train.py", line 7, in <module>\n    save()\n  File "/w/train.py", line 5, in save_checkpoint\n    x()\n'
    log = f"Traceback (most recent call last):\n{frames}{error}\n"
    first = diagnose(log.splitlines()).findings[0]
    doing = "while a checkpoint was saved"

    assert (first.title.count(doing), sum(doing in line for line in first.evidence)) == (in_title, in_evidence)
