"""Many configurations judged by one child with DeepSpeed in it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.config.answer import Asked, ConfigContext, Verdict
from dsdoctor.config.judge import judge
from dsdoctor.core.host import CHILD_SCRIPTS

SCRIPT = Path(__file__).with_name("ask_many.py")


def ask_many(
    configs: Sequence[Mapping[str, Any]],
    *,
    arguments: Sequence[str] = (),
    worlds: Sequence[int | None] = (),
    ranks: Sequence[int | None] = (),
    engine: bool = True,
) -> list[Asked]:
    """What DeepSpeed answers about each. ``arguments``: for each a file of TrainingArguments, "" for none; ``worlds``: ranks with
    data of their own; ``ranks``: all of them; ``engine``: whether one is made of it."""
    files = arguments or [""] * len(configs)
    some, every = worlds or [None] * len(configs), ranks or [None] * len(configs)
    requests = [
        {
            "config": config,
            "world": world or (1 if file else None),
            "ranks": total,
            "arguments": file,
            "accelerate": "",
            "model": "",
            "engine": engine,
        }
        for config, file, world, total in zip(configs, files, some, every, strict=True)
    ]
    command = [sys.executable, str(SCRIPT), str(CHILD_SCRIPTS)]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *rest = [msgspec.json.decode(line, type=Asked) for line in done.stdout.splitlines()]
    shared = {"sections": first.sections, "removed": first.removed, "names": first.names, "stages": first.stages}
    return [replace(answer, **shared) for answer in rest]


def judge_many(configs: Sequence[dict[str, Any]], *, engine: bool = True) -> list[tuple[Verdict, ...]]:
    """The verdicts on each, for a training that nobody says more about."""
    asked = ask_many(configs, engine=engine)
    return [judge(ConfigContext(config=config, asked=answer)) for config, answer in zip(configs, asked, strict=True)]
