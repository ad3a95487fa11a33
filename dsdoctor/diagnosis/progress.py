"""Lines of a run and frames of a traceback -> what it was doing: loading, training in step 812, saving."""

import re
from collections.abc import Iterable

from dsdoctor.diagnosis.failures import Frame

STEP = re.compile(
    rb"(?:\b(?:global[_ ])?(?:[Ss]tep|[Ii]ter(?:ation)?)['\"]?\]?\s{0,3}[=:#]?\s{0,3}(\d{1,9})\b(?![.%]))"
    rb"|(?:^|\r|\] ?:?)\s{0,3}\d{1,3}%\|[^|\r]{0,200}\|\s{0,9}(\d{1,9})/\d{1,9} \[\d"
)
"""A step of training: ``step 812``, ``global_step=812``, ``iteration 812/2000``, or the 812/2000 of a progress bar.

A bar with a name, and ``steps = 703``, are of something else.
"""

ENGINE = re.compile(r"checkpoint_engine[/\\]\w{1,60}\.py$")
"""A file of DeepSpeed whose load and save are of checkpoints."""

DOING = (
    (
        "while a checkpoint was saved",
        r"save_checkpoint|save_16bit_model|save_pretrained|_save(?:_\w+)?|save_model|async_save",
    ),
    ("while a checkpoint was loaded", r"load_checkpoint|_load_(?:zero_)?checkpoint|load_state_dict|resume_from_\w+"),
    ("while the model was loaded", r"from_pretrained|_load_pretrained_model"),
    (
        "while an op was built or loaded",
        r"jit_load|load_op|build_extension|_jit_compile|_write_ninja_file_and_build_library",
    ),
    ("in evaluation", r"evaluate|evaluation_loop|prediction_(?:step|loop)"),
    ("in training", r"backward|training_step|train_batch|allreduce_gradients|step|forward|inner_training_loop|train"),
    ("while the ranks met", r"init_distributed|init_process_group|new_group|rendezvous"),
    ("in deepspeed.initialize", r"initialize|_configure_\w+|_do_sanity_check"),
)
"""What a function's name says, the narrower ones first."""


def step_of(raw: bytes) -> int | None:
    """The number of the step that a line is about.

    >>> step_of(b"{'loss': 2.1, 'step': 812}"), step_of(b" 16%|#  | 118/703 [08:15<40:57,  4.20s/it]"), step_of(b"steps 1.5")
    (812, 118, None)
    """
    found = None
    for found in STEP.finditer(raw):  # noqa: B007
        pass
    return next(int(group) for group in found.groups() if group) if found else None


def last_step(lines: Iterable[bytes]) -> int | None:
    """The step of the last of these lines that names one. ``lines``: the last one first."""
    return next((step for raw in lines if (step := step_of(raw[-400:])) is not None), None)


def activity(frames: tuple[Frame, ...], step: int | None) -> str:
    """What a process was doing, by the functions it was in and the last step before; "" where nothing is known.

    >>> activity((Frame(path="a.py", line=1, function="save_checkpoint"),), 812)
    'while a checkpoint was saved, after step 812'
    >>> activity((Frame(path="d/runtime/checkpoint_engine/torch_checkpoint_engine.py", line=1, function="load"),), None)
    'while a checkpoint was loaded'
    """
    names = [frame.function.rpartition(".")[2] for frame in frames]
    names += [f"{name}_checkpoint" for name, frame in zip(names, frames, strict=True) if ENGINE.search(frame.path)]
    doing = next((text for text, pattern in DOING if any(re.fullmatch(pattern, name) for name in names)), "")
    if step is None:
        return doing
    return f"{doing}, after step {step}" if doing else f"after step {step}"
