"""A log that a container or a logger wrote as JSON records has the verdict of the log itself, on the lines of the file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.lines import JsonLines
from dsdoctor.diagnosis.models import Diagnosis
from tests.diagnosis.mixtures import BANNER, FAILURES, STEPS
from tests.diagnosis.reading import NO_RULE, diagnose
from tests.diagnosis.variations import logs
from tests.each import each

TIME = "2026-11-22T10:00:07.123Z"
Lines = list[str]


def docker(lines: Lines) -> Lines:
    return [json.dumps({"log": f"{line}\r\n", "stream": "stderr", "time": TIME}) for line in lines]


def fluentd(lines: Lines) -> Lines:
    of = {"pod_name": "train-worker-3", "container_name": "pytorch", "host": "gpu-7"}
    return [json.dumps({"@timestamp": TIME, "log": line, "kubernetes": of}, ensure_ascii=False) for line in lines]


def cloudwatch(lines: Lines) -> Lines:
    inner = [json.dumps({"levelname": "INFO", "asctime": TIME, "message": line}) for line in lines]
    return [f"{TIME} " + json.dumps({"timestamp": 17, "message": line, "logStreamName": "a-1"}) for line in inner]


def structlog(lines: Lines) -> Lines:
    """A traceback is one record, as every message of several lines is."""
    return [json.dumps({"event": "\n".join(part), "level": "error", "timestamp": TIME}) for part in _messages(lines)]


DIALECTS: tuple[Callable[[Lines], Lines], ...] = (docker, fluentd, cloudwatch, structlog)


def _messages(lines: Lines) -> Iterator[Lines]:
    held: Lines = []
    for line in lines:
        if held and not line.startswith((" ", "\t")) and not held[-1].startswith((" ", "\t")):
            yield held
            held = []
        held.append(line)
    yield held


def verdict(diagnosis: Diagnosis) -> tuple[str, str]:
    errors = [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]
    return (errors[0].rule, errors[0].title.removeprefix(f"{diagnosis.where}: ")) if errors else ("", "")


def others(part: slice) -> list[tuple[str, str, tuple[str, str], tuple[str, str]]]:
    """Log, dialect and the two verdicts, where they differ."""
    found = []
    for name, lines in list(logs("real"))[part]:
        right = verdict(diagnose(lines))
        for dialect in DIALECTS:
            if (told := verdict(diagnose(dialect(lines)))) != right:
                found.append((name, dialect.__name__, right, told))
    return found


def test_a_real_log_as_records_has_the_same_verdict_in_a_sample() -> None:
    assert others(slice(3, None, 70)) == []


@pytest.mark.slow
def test_a_real_log_as_records_has_the_same_verdict() -> None:
    assert others(slice(None)) == []


@each("key", ["rank", "global_rank", "local_rank"])
def test_the_rank_and_the_line_of_the_file_are_told(key: str) -> None:
    traceback = [line.removeprefix("[rank2]: ") for line in FAILURES["unknown"]]
    messages = [(0, [line]) for line in (*BANNER, *STEPS)] + [(6, traceback)] + [(0, [line]) for line in STEPS[:2]]
    log = [json.dumps({"ts": 1, key: rank, "pod": "asr-1", "msg": "\n".join(lines)}) for rank, lines in messages]
    found = diagnose(log)

    assert found.findings[0].title.startswith("rank 6: ")
    assert found.findings[0].evidence[0].startswith(f"line {len(BANNER) + len(STEPS) + 1}: ")
    assert found.lines == len(log)


@each("seed", range(20))
def test_every_line_is_counted_where_the_file_has_it(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice((0, 1, 1, 2, 5)) for _ in range(60)]  # 0: a line that is no record
    log = [json.dumps({"ts": 1, "msg": "\n".join(["a"] * size)}) if size else "plain" for size in [1, 1, *sizes]]
    records = JsonLines()
    given = len(list(records.unfold(log)))
    places = [place for place, size in enumerate([1, 1, *sizes], 1) for _ in range(size or 1)]

    assert [records.line_of_file(number) for number in range(1, given + 1)] == places


HOSTILE = (
    b'{"msg": ' + b"[" * 30_000 + b"]" * 30_000 + b', "ts": 1}',
    b'{"level": "error", "msg": "' + b"{" * 3000 + b'"}',
    b'{"ts": 1, "rank": 1' + b"0" * 4000 + b', "msg": "a"}',
    b'{"ts": 1, "rank": -1, "pod": "\\u001b[2J", "msg": "\\u0000"}',
    b'{"ts": 1, "rank": {"a": 1}, "pod": ["b"], "level": 7, "msg": "", "labels": {"labels": {"pod": 1}}}',
    b'{"ts": 1, "msg": "\\ud83d"}',
    b'{"ts": 1, "msg": "\xff\xfe"}',
    b'{"ts": 1, "msg": null, "log": "' + b"\\n" * 9000 + b'x"}',
    b'{"log": "' + b'{\\"log\\": \\"x\\", \\"stream\\": 1}' + b'", "stream": 1}',
)


def test_no_record_does_harm() -> None:
    """Nested without end, huge numbers, halves of characters, nothing in it: a diagnosis comes, and the lines are counted."""
    for record in HOSTILE:
        assert diagnose([record, record, b"", record]).lines in {3, 4}
    assert diagnose([*HOSTILE, *(line.encode() for line in FAILURES["unknown"])]).findings[0].rule in NO_RULE


def test_a_warning_stays_one_and_the_figures_of_a_step_are_read() -> None:
    said = {"level": "warning", "ts": 1, "msg": "RuntimeError: CUDA error: invalid device ordinal"}
    steps = [
        {"event": "train_step", "step": number, "loss": 2.5, "level": "info", "timestamp": TIME} for number in range(9)
    ]

    for level, errors in (("warning", 0), ("info", 1)):
        records = [*steps, said | {"level": level}, *(steps if level == "warning" else ())]
        found = diagnose([json.dumps(record) for record in records])
        assert len([finding for finding in found.findings if finding.severity is Severity.ERROR]) == errors
        assert "step 8" in found.activity or not errors


def test_a_record_in_a_log_that_is_none_stays_as_it_is() -> None:
    record = json.dumps({"level": "error", "ts": 1, "msg": "RuntimeError: CUDA error: invalid device ordinal"})

    assert diagnose([*BANNER, record, *STEPS]).findings == diagnose([*BANNER, f"{record} ", *STEPS]).findings
    assert verdict(diagnose([record]))[0] == "gpu-ordinal-invalid"
