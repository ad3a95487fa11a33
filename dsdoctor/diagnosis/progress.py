"""What a run was doing: its stages, its losses, its last words."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from dsdoctor.diagnosis.failures import Frame
from dsdoctor.diagnosis.lines import last_segment

# Lines of a run and frames of a traceback -> what it was doing: loading, training in step 812, saving.


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


# Lines with losses and gradient norms -> the series of those that are no numbers.


NAN_LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)
NAN_NORM = re.compile(rb"\bgrad_?(?:ient_?)?norm['\"]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)
ZERO_LOSS = re.compile(rb"\bloss['\"]?\s{0,3}[:=]\s{0,3}['\"]?0(?:\.0{1,9})?(?![\d.])", re.IGNORECASE)
FINITE = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?\d{1,9}(?:\.\d{1,20})?\b", re.IGNORECASE)


@dataclass
class Series:
    """Losses, or gradient norms, that are no numbers."""

    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""
    step: int | None = None
    of_norms: bool = False
    before: str = ""
    """The step before, where its gradient was no number and its loss was one."""

    def note(self, raw: bytes, line: int, recent: Sequence[bytes]) -> None:
        """A line with nan, perhaps that of a loss. ``recent``: the lines before it."""
        of_norms = not NAN_LOSS.search(raw)
        if of_norms and not NAN_NORM.search(raw):
            return
        if of_norms and FINITE.search(raw) and not ZERO_LOSS.search(raw):
            if not self.count:
                self.before = last_segment(raw)[:200]
            return  # why: fp16 finds its loss scale by steps whose gradients overflow, and skips them
        if not self.count:
            step = last_step([raw, *reversed(recent)])
            self.first, self.text, self.step, self.of_norms = line, last_segment(raw)[:200], step, of_norms
        self.count += 1
        self.last = line

    def finite_again(self, last_line: int, recent: Sequence[bytes]) -> bool:
        """Whether a loss after the last nan is a number."""
        after = list(recent)[-(last_line - self.last) :] if last_line > self.last else []
        return any(FINITE.search(raw) and not NAN_LOSS.search(raw) and not ZERO_LOSS.search(raw) for raw in after)


# The last lines before the ranks waited -> that the loss had fallen to exactly 0.0: the training was broken before it hung.


LOSS = re.compile(
    rb"['\"]?\b(?:lm[_ ])?loss['\"]?\s{0,3}[:=]\s{0,3}['\"]?(\d{1,9}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?)(?![\d.])"
)
OF_A_REWARD = re.compile(rb"reward|\bkl\b|advantage|completion_length|completions/|clip_ratio")
"""Words of lines of reinforcement learning, where a loss of 0 is nothing strange."""

PLAUSIBLE = 1.0
"""A loss from which a training seldom falls to what is printed as zero within a log line."""


def loss_of_zero(raws: list[bytes]) -> str:
    """What is told of a loss that was a plausible one, and then exactly zero up to the last line that has one; "" otherwise.

    >>> loss_of_zero([b"{'loss': 3.5534, 'epoch': 0.01}", b"{'loss': 0.0, 'epoch': 0.01}"])
    "the loss was printed as 0.0 before, and 3.5534 before that: learning may have broken down (labels that are all \
masked, a kernel or weights that give nan); that may be the cause of both: {'loss': 0.0, 'epoch': 0.01}"
    >>> loss_of_zero([b"{'loss': 3.5534}", b"{'loss': 0.0}", b"{'loss': 2.1}"])
    ''
    """
    told = [(found[1], raw) for raw in raws if (found := LOSS.search(raw[-600:])) and not OF_A_REWARD.search(raw)]
    if not told or float(told[-1][0]) != 0:
        return ""
    before = next((value for value, _ in reversed(told) if float(value) != 0), None)
    if before is None or float(before) < PLAUSIBLE:
        return ""
    return (
        f"the loss was printed as {told[-1][0].decode()} before, and {before.decode()} before that: learning may have broken down "
        "(labels that are all masked, a kernel or weights that give nan); that may be the cause of both: "
        f"{last_segment(told[-1][1])[:160]}"
    )


# The lines before a process's end -> what its logger said last of an error; a program that catches all prints no traceback.


NEAR = 6
"""So many lines before the end, at most, stands what a program said of it."""

A_LOGGER = re.compile(r"(?:^|[\s\[|])(?:ERROR|CRITICAL|FATAL)(?:[\s\]|]|:\S{0,60}:)")
"""The level of a line that tells of an error."""

NO_PROGRAM = re.compile(
    r"torch/distributed|launch\.py:\d|launcher/|srun: |slurm|mpirun|elastic|Root Cause|^ERROR: |exit(?:ed|s|code)?\b.{0,20}\d"
)
"""Lines of launchers and of tools, which tell of another process."""

GOES_ON = re.compile(r"[Rr]etry|[Ss]kip|[Cc]ontinu|again|[Ii]gnor|non-fatal|fall(?:ing)? back")


def last_words(before: Iterable[bytes], line: int) -> tuple[int, str] | None:
    """The number and the text of the line. ``before``: the lines before this one, the last one first.

    >>> last_words([b"", b"2026-11-23 ERROR trainer: Fatal: no rows"], 9), last_words([b"ERROR trainer: bad row, skipping it"], 9)
    ((7, '2026-11-23 ERROR trainer: Fatal: no rows'), None)
    """
    for age, raw in enumerate(islice(before, NEAR), 1):
        if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]):
            return None
        text = raw.decode("utf-8", "replace").strip()
        if A_LOGGER.search(text[:200]) and not NO_PROGRAM.search(text):
            return None if GOES_ON.search(text) else (line - age, last_segment(raw)[:400])
    return None
