"""Exceptions that a library raised on purpose are read as statements: what they require, what they got, what to change."""

from itertools import product

from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.diagnosis.reading import diagnose
from tests.each import each

START = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 41, in <module>', "    main()"]
SITE = "/v/lib/python3.11/site-packages"
DEEPSPEED, SWIFT = f"{SITE}/deepspeed/runtime/engine.py", f"{SITE}/swift/trainers/mixin.py"


def raised(path: str, source: str, *end: str) -> Diagnosis:
    return diagnose([*START, f'  File "{path}", line 9, in step', f"    {source}", *end])


def test_an_assertion_without_words_is_told_by_its_condition() -> None:
    first = raised(DEEPSPEED, "assert self.odd_gate.is_open", "AssertionError").findings[0]

    assert first.rule == "assertion-without-words"
    assert "DeepSpeed asserts that self.odd_gate.is_open" in first.title
    assert first.fix and f"{DEEPSPEED}:9" in first.fix.text and "/home/u/train.py:41" in first.fix.text


def test_the_condition_of_an_assertion_is_evidence() -> None:
    told = raised(DEEPSPEED, "assert self.odd_size % args.odd_parts == 1, 'odd'", "AssertionError: odd `odd_mode`")

    assert (told.outcome, told.findings[0].rule) == (LogOutcome.UNEXPLAINED, "unexplained-failure")
    assert "it asserts self.odd_size % args.odd_parts == 1" in told.findings[0].evidence


def test_what_only_happened_in_a_library_is_no_refusal() -> None:
    told = raised(DEEPSPEED, "x = self.odd_table[7]", "KeyError: 7")

    assert "on purpose" not in told.findings[0].title


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
    told = raised(SWIFT, "raise", f"{exception}: {words}")

    assert told.findings[0].rule == "settings-exclude-each-other"
    assert words.rstrip(".")[:40] in told.findings[0].title


@each(("exception", "words"), list(product(EXCEPTIONS, REQUESTS)))
def test_a_sentence_that_asks_for_something_is_understood(exception: str, words: str) -> None:
    told = raised(SWIFT, "raise", f"{exception}: {words}")

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
    rules = {finding.rule for finding in raised(SWIFT, "raise", f"RuntimeError: {words}").findings}

    assert not {"settings-exclude-each-other", "library-asks-for"} & rules


STATED = (
    (
        "ValueError: alpha_size (28) must be divisible by beta size (8).",
        "sizes-do-not-divide",
        "alpha_size (28)|beta size (8)",
    ),
    ("AssertionError: hidden width is not a multiple of the group", "sizes-do-not-divide", "hidden width|group"),
    ("AssertionError: alpha packing is only available with sharded training", "works-only-with", "sharded training"),
    ("ValueError: alarms only work in the first thread", "works-only-with", "in first thread"),
    ("ValueError: Expected 4 experts but got 3", "other-than-expected", "expects 4 experts, and got 3"),
    (
        "TypeError: alpha must be a list of ints, got dict",
        "other-than-expected",
        "expects a list of ints, and got dict",
    ),
    ("AssertionError: alpha_batch 0 should be larger than 0", "value-out-of-range", "outside the range"),
    ("ValueError: prompt is longer than the model's limit of 512", "value-out-of-range", "outside the range"),
    (
        "alpha.UsageError: alpha_key not configured (no-tty). call alpha.login(key=[your_key])",
        "value-not-set",
        "alpha_key is",
    ),
    ("AssertionError: Judge model is not correctly loaded.", "value-not-set", "Judge model is missing"),
    ("alpha.NotLaunchedError: No pool name found in the cluster", "value-not-set", "pool name is missing"),
    ("ValueError: column alpha not in the table: ['beta', 'gamma']", "entry-not-listed", "alpha does not exist there"),
)


@each(("words", "rule", "title"), STATED)
def test_a_statement_tells_what_is_required_and_what_was_given(words: str, rule: str, title: str) -> None:
    first = raised(SWIFT, "raise", words).findings[0]

    assert first.rule == rule
    assert [part for part in title.split("|") if part not in first.title] == []
    assert first.fix and "/home/u/train.py:41" in first.fix.text


def test_a_field_that_a_class_does_not_have_is_named_from_the_lines_below() -> None:
    below = ("data.corpus.alpha_lang", "  Extra inputs are not permitted [type=extra_forbidden, input_value='fr']")
    first = raised(
        SWIFT, "raise", "pydantic_core.ValidationError: 2 validation errors for AlphaConfig", *below
    ).findings[0]

    assert first.rule == "field-unknown"
    assert "AlphaConfig has no field data.corpus.alpha_lang" in first.title
    assert first.fix and "extra_forbidden" not in first.fix.text


@each(
    ("source", "told"),
    [("raise AlphaError(", "swift stopped on purpose"), ("return alphas[name]", "no rule explains this failure")],
)
def test_what_states_nothing_is_told_with_its_own_words(source: str, told: str) -> None:
    first = raised(f"{SITE}/peft/x.py", source, "AlphaError: the tracker went away").findings[0]

    assert told.replace("swift", "peft") in first.title and "AlphaError: the tracker went away" in first.title


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
