"""What DeepSpeed 0.19.8 answered, written down by record_answer.py; and questions made of it."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.config.answer import Asked, ConfigContext, Effective, Verdict
from dsdoctor.config.judge import judge


@functools.cache
def recorded() -> Asked:
    return msgspec.json.decode(Path(__file__).with_name("answer.json").read_bytes(), type=Asked)


def question(config: dict[str, Any], *, answer: dict[str, Any] | None = None, **facts: Any) -> ConfigContext:
    """A question whose answer is the recorded one with changes."""
    told = {"facts": Effective(stage=0), "config": config, **(answer or {})}
    return ConfigContext(config=config, asked=replace(recorded(), **told), **facts)


def verdicts(config: dict[str, Any], **more: Any) -> tuple[Verdict, ...]:
    return judge(question(config, **more))


def rules(found: Sequence[Verdict]) -> list[str]:
    return [verdict.finding.rule for verdict in found]
