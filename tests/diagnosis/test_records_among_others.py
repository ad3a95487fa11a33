"""Records in a log of another kind: samples of data are none, docker's and those with a traceback are; a level is kept."""

from __future__ import annotations

import json

import pytest

from dsdoctor.core.finding import has_error
from dsdoctor.diagnosis.lines import LEVELS, TEXTS, lines_in
from tests.diagnosis.mixtures import BANNER, FAILURES, STEPS, alone
from tests.diagnosis.reading import diagnose
from tests.each import each

TRACEBACK = 'Traceback (most recent call last):\n  File "/w/a.py", line 7, in load\n    import requests\n'
EXCEPTIONS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "ModuleNotFoundError: No module named 'requests'",
    "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be reported asynchronously",
)
SAMPLES = (
    {"timestamp": "2019-04-25T12:57:54Z", "url": "https://a.example/q"},
    {"date": "2001-02-03"},
    {"rank": 1, "score": 0.7},
    {"level": "Level 5", "subject": "Algebra"},
    {"host": "a.example", "time": 17, "lang": "en"},
    {"created": 17, "rank_id": 3, "id": 9},
)
PLAIN = ["loading", *alone(STEPS), "saving"]


@each("sample", SAMPLES)
@each("key", ["text", "body"])
def test_a_sample_of_data_is_no_record(key: str, sample: dict[str, object]) -> None:
    for exception in (*EXCEPTIONS, "Killed"):
        rows = [json.dumps({key: f"I see\n{TRACEBACK}{exception}\nwhat now?", **sample})] * 2
        assert lines_in(rows[0].encode()) is None
        for log in ([*rows, *PLAIN], [*PLAIN, *rows, *PLAIN], [*PLAIN, *rows], rows * 3, ["loading", *rows, "saving"]):
            assert not has_error(diagnose(log).findings)


def test_an_event_of_a_day_is_no_record() -> None:
    rows = [json.dumps({"event": text, "date": "2001-02-03"}) for text in ("Killed", "Born")]

    assert not has_error(diagnose([*rows, *PLAIN]).findings)


@each("key", TEXTS)
@each("beside", [*LEVELS, "logger", "stream", "pod", "container_name"])
def test_what_only_a_log_has_makes_a_record(key: str, beside: str) -> None:
    assert lines_in(json.dumps({key: "a", beside: "info"}).encode())


@each("stream", ["stdout", "stderr"])
@each("before", [0, 1, 4])
@each("after", [0, 1, 4])
def test_a_lone_record_of_docker_is_read(before: int, after: int, stream: str) -> None:
    for exception in EXCEPTIONS[:2]:
        record = json.dumps({"log": f"{exception}\n", "stream": stream, "time": "x"})
        log = [*BANNER[:1] * before, record, *BANNER[:1] * after]
        assert diagnose(log).findings[0].rule == diagnose([exception]).findings[0].rule


@each("trace", ["exc_info", "exception", "stack_trace", "error"])
@each("beside", [{"level": "error"}, {"severity": "CRITICAL"}, {"logger": "trainer"}])
def test_a_lone_record_with_a_traceback_is_read(beside: dict[str, str], trace: str) -> None:
    losses = [f"{{'loss': 1.{number}, 'epoch': 0.1}}" for number in range(20)]
    for exception in EXCEPTIONS:
        record = json.dumps({"ts": 1, "msg": "training failed", trace: TRACEBACK + exception, **beside})
        told = diagnose([*losses, record, *BANNER]).findings[0]
        assert told.rule == diagnose([*losses, *(TRACEBACK + exception).split("\n"), *BANNER]).findings[0].rule
        assert told.evidence[0].startswith("line 21: ")


KEYS_OF_TRACEBACKS = ("exc_info", "exception", "stack_trace", "error")
LEVELS_BELOW = ("warning", "WARN", "info", "debug")


def told_wrongly(trace: str, level: str, work: int) -> list[object]:
    """What is told of a traceback that a warning bears, in the midst of so many records: it is no failure, and hides none."""
    found: list[object] = []
    for text in (words for exception in EXCEPTIONS for words in (TRACEBACK + exception, exception)):
        said = {"ts": 1, "level": level, "msg": "could not import optional", trace: text}
        if level.startswith(("w", "W")) and trace == "error":
            said = {
                "ts": 1,
                "level": level,
                "event": f"could not import optional\n{TRACEBACK}{text.removeprefix(TRACEBACK)}",
            }
        others = [{"ts": 1, "level": "info", "msg": f"working {number}"} for number in range(work)]
        for records in ([said, *others], [*others, said], [*others, said, *others[:3]], [said, said, *others]):
            told = diagnose([json.dumps(record) for record in records]).findings
            found += [(trace, level, text, told[0].title)] if has_error(told) else []
        died = {"ts": 2, "level": "error", "msg": "\n".join(alone(FAILURES["known"]))}
        first = diagnose([json.dumps(record) for record in (said, *others, died)]).findings[0]
        found += [(trace, level, text, first.title)] if first.rule != KNOWN else []
    return found


KNOWN = "placeholder-in-use"


def test_the_traceback_of_a_warning_is_no_failure_in_a_sample() -> None:
    assert told_wrongly("exc_info", "WARN", 70) + told_wrongly("error", "warning", 70) == []


@pytest.mark.slow
@each("level", LEVELS_BELOW)
@each("trace", KEYS_OF_TRACEBACKS)
def test_the_traceback_of_a_warning_is_no_failure(trace: str, level: str) -> None:
    assert told_wrongly(trace, level, 100) == []


AGENTS = (
    'ts=2026-11-22T10:00:07Z level=error component=agent msg="{}"',
    'time="2026-11-22T10:00:07.123Z" level=error msg="sync failed: {}" node=g033',
    'n7 shipper: ts=2026-11-22T10:00:07Z caller=x.go:7 level=warn component=tail msg="{}"',
)
OF_ANOTHER = (
    "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current "
    "world size is 16.",
    "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/3: write failed",
)


@each("agent", AGENTS)
@each("words", OF_ANOTHER)
def test_what_a_daemon_tells_of_an_exception_is_not_of_the_run(agent: str, words: str) -> None:
    line = agent.format(words)
    raised = alone(FAILURES["known"])
    for log in ([line, *raised], [*raised, line], [line, "working", line, *raised]):
        assert diagnose(log).findings[0].rule == KNOWN
    ended = "[ERROR] [launch.py:325:sigkill_handler] ['/v/bin/python', 'train.py', '--local_rank=3'] exits with return code = -11"
    assert diagnose([line, *BANNER, ended]).findings[0].rule == "died-by-signal"
    assert not has_error(diagnose([line, *(f"step {number} loss 1.2" for number in range(9))]).findings)


@each("words", OF_ANOTHER)
def test_a_log_that_is_written_so_in_every_line_is_of_the_run(words: str) -> None:
    lines = ["starting", "loading", words]

    told = diagnose([f'ts=2026-11-22T10:00:07Z level=info component=rank0 msg="{line}"' for line in lines])
    assert [hit.rule for hit in told.findings if hit.severity.value != "note"] == [
        finding.rule for finding in diagnose([f'msg="{line}"' for line in lines]).findings
    ]
