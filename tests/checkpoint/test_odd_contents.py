"""Whatever the files of a checkpoint say: each judgement of them ends in findings, or in an error of our own."""

import contextlib
import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.deep import judge_values
from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan
from dsdoctor.checkpoint.text import checkpoint_lines, checkpoint_parts
from dsdoctor.checkpoint.universal import needs, refusals
from dsdoctor.checkpoint.weights import NotMerged, sources_of
from dsdoctor.core.errors import DoctorError
from dsdoctor.ui.screen import document
from tests.checkpoint.test_pickles import shared
from tests.checkpoint.test_universal import universal
from tests.checkpoint.written import (
    KINDS,
    Called,
    Kind,
    Opcodes,
    Weights,
    floats,
    model_states,
    optimizer_states,
    save,
    write,
)

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31 - 1,
    10**12,
    2**63,
    2**4000,
    -(2**70),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\n\x1b[31m",
    "1" * 5000,
    (),
    (1,),
    ("a", 2),
    [],
    [1, None],
    [[]],
    {},
    {"a": 1},
    {1: {2: {}}},
    floats([]),
    floats([1.0, float("nan")]),
    Weights((2, 0), b""),
    Weights((), b"\0" * 8, "I64"),
    Called("posix", "system", ("true",)),
    Called("torch", "Size", ((1, 2),)),
    Called("deepspeed.utils.tensor_fragment", "fragment_address", (), {"start": -5, "numel": 2**40}),
    Called("deepspeed.runtime.zero.config", "ZeroStageEnum", (None,)),
    Opcodes(shared(12)[2:-1]),
    Opcodes(b"V\\ud800\n"),
    Opcodes(b"C\x02\xff\xfe"),
    Opcodes(b"ctorch\nfloat32\n"),
    Opcodes(b"\x8c\x01.\x94h\0h\0\x86h\0\x86"),
    tuple(range(70)),
    [2**31] * 5,
)


def places_in(content: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found, waiting = [], [content]
    while waiting:
        value = waiting.pop()
        state = value.state if isinstance(value, Called) else value
        keys = list(state) if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ()
        for key in keys:
            found.append((state, key))
            waiting.append(state[key])
    return found


def plant(choice: random.Random, content: Any) -> None:
    """Put something odd where something else is expected, or leave it out, or give it another name."""
    places = places_in(content)
    if not places:
        return
    container, key = choice.choice(places)
    match choice.randrange(6):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1 if isinstance(container, dict):
            container[choice.choice(("", "x.deepspeed_experts.1.w", "a\ud7ff", 7, "0.first"))] = container.pop(key)
        case _:
            container[key] = copy.deepcopy(choice.choice(ODD))


def judged_whole(folder: Path) -> int:
    """Judge a folder in every way that runs nothing of it; how many findings there are."""
    judged = judge(
        look(folder), None, Plan(world=4), available=1 << 30, ranks_here=2,
        values=lambda examined: judge_values(examined, lambda count: None),
    )  # fmt: skip
    assert "\x1b" not in "".join(finding.title for finding in judged.findings)
    assert list(checkpoint_lines(judged, 1 << 30))
    document("checkpoint", judged.findings, **checkpoint_parts(judged)).encode()
    unread = [file.unknown for file in judged.examined.tag.files] if judged.examined else []
    assert not any("could not be read:" in why for why in unread), unread
    if judged.examined is not None:
        list(refusals(judged.examined))
        needs(judged.examined, cpus=2, available=1 << 30)
        with contextlib.suppress(NotMerged):
            assert sources_of(judged.examined, "F32")
    return len(judged.findings)


def fuzz_checkpoint(choice: random.Random, folder: Path) -> int:
    """Write a checkpoint with odd contents in some of its files, and judge it."""
    shutil.rmtree(folder, ignore_errors=True)
    kind = choice.choice((*KINDS, "universal"))
    if kind == "universal":
        kind = Kind(stage=choice.choice((1, 2, 3)))
        tag = universal(folder / "global_step2_universal", kind)
    else:
        tag = write(folder, kind)
    for file in choice.sample(sorted(tag.rglob("*.pt")), k=1):
        content: Any = {"param": floats([1.0])}
        if "model_states" in file.name:
            content = model_states(kind, kind.world, 2 if kind.pipeline else 1)
        elif "optim_states" in file.name:
            content = optimizer_states(kind, 0, kind.world)
        for _ in range(choice.randint(1, 4)):
            plant(choice, content)
        save(file, choice.choice(ODD) if choice.random() < 0.05 else content)
    try:
        return judged_whole(folder)
    except DoctorError:
        return 0


@pytest.mark.parametrize(
    "count", [pytest.param(40, id="some"), pytest.param(5_000, id="many", marks=pytest.mark.exhaustive)]
)
def test_odd_contents_end_in_findings(count: int, tmp_path: Path) -> None:
    choice = random.Random(count)

    assert sum(fuzz_checkpoint(choice, tmp_path / "saved") > 0 for _ in range(count)) > count // 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_elements_than_a_float_can_count_are_a_finding(stage: int, tmp_path: Path) -> None:
    kind = Kind(stage=stage)
    tag = write(tmp_path, kind)
    for rank in range(kind.world if stage == 3 else 1):
        content = model_states(kind, kind.world, 1)
        held = content["param_shapes"]
        for group in held if isinstance(held, list) else [held]:
            group.update(dict.fromkeys(group, (2**62,) * 64))
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        save(tag / f"{name}_model_states.pt", content)

    judged = judge(look(tmp_path), tag.name, Plan())

    assert judged.findings
    assert judged.examined is not None
    assert needs(judged.examined, cpus=1, available=None).memory > 2**62
    assert [*checkpoint_lines(judged, None)]
