"""A library refuses a value: the answer names what the message says of it, and who passed it, not the library's release."""

from __future__ import annotations

from dsdoctor.diagnosis.models import Diagnosis
from tests.diagnosis.reading import diagnose
from tests.each import each

SITE = "/v/lib/python3.11/site-packages"


def raised(message: str, *places: tuple[str, str]) -> Diagnosis:
    """A traceback through these places; each has its line of source."""
    frames = [
        line
        for path, source in places
        for line in (f'  File "{path}", line 7, in call', *([f"    {source}"] if source else []))
    ]
    return diagnose(["Traceback (most recent call last):", *frames, message])


MINE, AXOLOTL, VLLM = (
    ("/home/u/train.py", "main()"),
    ("/home/u/axolotl/src/axolotl/train.py", "run()"),
    "/vllm/config.py",
)

PASSED = (
    # from the user's own code through a library that only passes it on
    (
        "ValueError: max_grad_norm must be positive",
        (MINE, (f"{SITE}/transformers/trainer.py", "x()"), (f"{SITE}/accelerate/a.py", "raise ValueError(")),
        "/home/u/train.py:7",
    ),
    # the nearest program above counts, not the outermost
    (
        "ValueError: tensor_parallel_size (3) does not work with 4 heads",
        (MINE, AXOLOTL, (f"{SITE}{VLLM}", "raise ValueError(")),
        "/home/u/axolotl/src/axolotl/train.py:7",
    ),
    # nobody above: the command or its configuration
    (
        "AssertionError: micro_batch_size should be larger than 0",
        (("/home/u/verl/verl/trainer/a.py", "assert self.micro_batch_size > 0, ("),),
        "your command or its configuration",
    ),
    # of C++ there is no line of source
    (
        "RuntimeError: batch_first layout is not supported by this kernel",
        (MINE, (f"{SITE}/torch/nn/functional.py", "")),
        "/home/u/train.py:7",
    ),
)


@each(("message", "places", "who"), PASSED)
def test_who_passed_the_refused_value_is_named(message: str, places: tuple[tuple[str, str], ...], who: str) -> None:
    first = raised(message, *places).findings[0]

    assert first.rule != "unexplained-failure"
    assert first.fix and who in first.fix.text


def test_two_libraries_that_do_not_match_are_still_compared_by_release() -> None:
    first = raised("IndexError: no such row", MINE, (f"{SITE}/odd_lib/x.py", "return rows[3]")).findings[0]

    assert first.fix and "on purpose" not in first.title


GENERAL = (
    ("RuntimeError: Version mismatch: The cluster was started with:", f"{SITE}/ray/_private/utils.py", "environments"),
    ("ConnectionError: Could not find any running Ray instance.", f"{SITE}/ray/worker.py", "does not answer"),
    ("ValueError: all parameters need the same dtype, got torch.float32", f"{SITE}/torch/x.py", "several dtypes"),
    ("jinja2.exceptions.TemplateError: System role not supported", f"{SITE}/transformers/x.py", "chat template"),
    ("ValueError: Video tokens and video features do not match: 7, 9", f"{SITE}/transformers/x.py", "placeholders"),
    ("requests.HTTPError: 401 Client Error: Unauthorized for url", f"{SITE}/mlflow/x.py", "refuses this account"),
    ("ValueError: no reader for file_type=''", "/home/u/verl/verl/utils/x.py", "file_type is empty"),
    ("RuntimeError: t.valid() INTERNAL ASSERT FAILED at x.cpp", f"{SITE}/torch/x.py", "state that it does not expect"),
    (
        "ValueError: Missing keys in checkpoint state_dict: optim.exp_avg.",
        f"{SITE}/torch/x.py",
        "no entry of this name",
    ),
    ("TypeError: sequence item 0: expected str instance, dict found", "/home/u/slime/slime/utils/x.py", "do not go"),
)


@each(("message", "path", "title"), GENERAL)
def test_the_kind_of_an_exception_answers_where_no_rule_does(message: str, path: str, title: str) -> None:
    first = raised(message, MINE, (path, "call(")).findings[0]

    assert title in first.title and first.rule != "unexplained-failure"


def test_what_a_process_said_just_before_is_evidence() -> None:
    log = ["Provided path /out/rm does not contain value head weights", "Traceback (most recent call last):"]
    place = '  File "/home/u/LLaMA-Factory/src/llamafactory/x.py", line 9, in make'
    first = diagnose([*log, place, "    assert load(path) is not None, (", "AssertionError: not loaded"]).findings[0]

    assert "before it, line 1: Provided path /out/rm does not contain value head weights" in first.evidence
