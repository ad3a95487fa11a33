"""Words and steps behind a failure: what really shows that a program went on, and what a run that is over still prints."""

from __future__ import annotations

from dsdoctor.core.finding import Severity, has_error
from tests.diagnosis.reading import diagnose, without_general

Lines = list[str]
STEPS = [f"step {number} loss: 1.9{number}00 lr: 0.0001" for number in range(1, 4)]
MORE = [f"step {number} loss: 1.9{number}00 lr: 0.0001" for number in range(4, 8)]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB."
KEY, INDEX = "KeyError: 'label'", "IndexError: list index out of range"
CLOSED = "ValueError: I/O operation on closed file"
GONE = "RuntimeError: Connection closed by peer [127.0.0.1]:3333"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"


def rooted(exception: str, at: int, source: str = "x = row['label']") -> Lines:
    """A traceback that begins where the program does."""
    frames = ['  File "/w/train.py", line 90, in <module>', "    main()", f'  File "/w/train.py", line {at}, in main']
    return ["Traceback (most recent call last):", *frames, f"    {source}", exception]


def hook(exception: str, path: str, function: str) -> Lines:
    """What a function prints that runs when Python ends."""
    return [
        "Traceback (most recent call last):",
        f'  File "{path}", line 20, in {function}',
        "    self._atexit()",
        exception,
    ]


def of(rank: int, lines: Lines) -> Lines:
    """The lines with the label of a rank."""
    return [f"[rank{rank}]: {line}" for line in lines]


def ended(code: int, rank: int = 0) -> Lines:
    """DeepSpeed's launcher on the end of a process."""
    return [
        f"[2026-11-23 05:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'train.py', '--local_rank={rank}'] "
        f"exits with return code = {code}"
    ]


def torchrun(rank: int) -> Lines:
    """The summary of torchrun."""
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "Root Cause (first observed failure):",
        "[0]:",
        "  host      : node0",
        f"  rank      : {rank} (local_rank: {rank})",
        "  exitcode  : 1 (pid: 4242)",
    ]


def word(line: str, exception: str, hooked: Lines, *end: str) -> Lines:
    """A run that an exception ended, a sentence behind it, and a hook of the end that fails."""
    return [*STEPS, *rooted(exception, 61), line, *hooked, *end]


WANDB = hook(CLOSED, "/v/site-packages/wandb/sdk/wandb_run.py", "finish")
WEAKREF = hook(CLOSED, "/usr/lib/python3.11/weakref.py", "_run")
JOIN = hook(
    "AssertionError: can only join a child process", "/usr/lib/python3.11/multiprocessing/util.py", "_exit_function"
)
SHAPES = hook("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 8x8)", "/w/train.py", "last_words")
BUILD = [
    "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 9, in fast',
    "    from deepspeed.ops.adam import FusedAdam",
    '  File "/v/site-packages/torch/utils/cpp_extension.py", line 2100, in _run_ninja_build',
    "    raise RuntimeError(message) from e",
    "RuntimeError: Error building extension 'fused_adam'",
    "falling back to torch Adam",
    *STEPS,
    *MORE,
]
BORNE = [*hook("ValueError: bad row 5", "/w/train.py", "main"), "WARNING: skipping bad row"]
FIRST = of(1, rooted(KEY, 61))
CASES: dict[str, tuple[Lines, str, tuple[str, ...]]] = {
    "skipping": (word("Skipping final checkpoint because training failed", OOM, WANDB), "gpu-oom", ()),
    "disabled": (word("swanlab: code saving is disabled", OOM, WANDB), "gpu-oom", ()),
    "retrying is disabled": (word("torchelastic: retrying is disabled", OOM, JOIN, *ended(1)), "gpu-oom", ()),
    "tensorboard": (word("[INFO] tensorboard is disabled", KEY, WEAKREF), "unexplained-failure", (KEY,)),
    "another fails at the end": (
        word(
            "Using CPU for the final evaluation instead", OOM, ["Error in atexit._run_exitfuncs:", *SHAPES], *ended(1)
        ),
        "gpu-oom",
        (),
    ),
    "a peer is gone": (
        word("wandb is disabled", KEY, rooted(GONE, 70, "dist.all_reduce(t)"), *ended(1)),
        "unexplained-failure",
        (KEY, "train.py:61"),
    ),
    "aborted": (word("Using default SIGTERM handler instead", KEY, [], *ended(-6)), "unexplained-failure", (KEY,)),
    "segmentation fault": (word("Skipping final evaluation", KEY, [], *ended(-11)), "unexplained-failure", (KEY,)),
    "steps of another rank": (
        [*STEPS, *FIRST, *MORE, *of(0, rooted(INDEX, 77)), *torchrun(1)],
        "unexplained-failure",
        ("rank 1: ", KEY),
    ),
    "steps of another rank, no root": (
        [
            *FIRST,
            *STEPS,
            *MORE,
            *of(0, rooted("RuntimeError: a peer died", 77, "raise RuntimeError() from e")),
            *ended(1, 1),
        ],
        "unexplained-failure",
        ("rank 1: ", KEY),
    ),
    "steps of another rank, known": (
        [*STEPS, *FIRST, *MORE, *of(0, rooted("OSError: [Errno 28] No space left on device", 77)), *torchrun(1)],
        "unexplained-failure",
        ("rank 1: ", KEY),
    ),
    "memory of another rank": (
        [*STEPS, *of(1, rooted(OOM, 50)), *of(0, rooted(INDEX, 61)), *torchrun(0)],
        "unexplained-failure",
        ("rank 0: ", INDEX),
    ),
    "GPU of another rank": (
        [*STEPS, *of(1, rooted(ILLEGAL, 50)), *of(0, rooted(INDEX, 61)), *torchrun(0)],
        "unexplained-failure",
        ("rank 0: ", INDEX),
    ),
    "what a build did not make": (
        [*BUILD, *rooted("RuntimeError: fused_adam extension is not available", 61, "opt.step()")],
        "gpu-arch-unsupported-by-nvcc",
        ("compute_120",),
    ),
    "not of a build": ([*BUILD, *rooted(KEY, 61), *ended(1)], "unexplained-failure", (KEY,)),
    "tried again by a process that dies again": (
        [*STEPS, *rooted(OOM, 50), "Will retry in 3 s", "connected", *rooted(KEY, 61)],
        "unexplained-failure",
        (KEY, "train.py:61"),
    ),
    "a logger's last words": (
        [
            *STEPS,
            *BORNE,
            *MORE,
            "2026-11-23 05:00:00,123 ERROR trainer: Fatal: KeyError: 'labels' in collate",
            *ended(1),
        ],
        "unexplained-failure",
        ("rank 0: ", "Fatal: KeyError: 'labels' in collate"),
    ),
    "a logger gives up": (
        [
            "WARNING download failed: HTTPError: 503, retrying (1/3)",
            "ERROR giving up: HTTPError: 503 for url: x",
            *ended(1),
        ],
        "unexplained-failure",
        ("rank 0: ", "HTTPError: 503 for url"),
    ),
    "a logger went on": (
        [*STEPS, "ERROR trainer: bad row 5, skipping it", *MORE, *ended(1)],
        "ended-without-words",
        ("no error from it",),
    ),
}
"""A log, the rule that is told first, and words of its title."""


def test_only_what_shows_that_a_program_went_on_takes_a_cause_away() -> None:
    wrong = {}
    for name, (lines, rule, words) in CASES.items():
        told = [one for one in diagnose(lines).findings if one.severity is Severity.ERROR]
        if [without_general(one.rule) for one in told] != [rule] or not all(one in told[0].title for one in words):
            wrong[name] = [f"{one.rule}: {one.title}" for one in told]

    assert wrong == {}


def group(*exceptions: Lines) -> Lines:
    """A group of exceptions as Python prints it."""
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/w/train.py", line 90, in <module>',
        '  |     raise ExceptionGroup("bad rows", errors)',
        f"  | ExceptionGroup: bad rows ({len(exceptions)} sub-exceptions)",
    ]
    for number, one in enumerate(exceptions, 1):
        lines += [
            f"  +-+---------------- {number} ----------------"
            if number == 1
            else f"    +---------------- {number} ----------------",
            *(f"    | {line}" for line in one),
        ]
    return [*lines, "    +------------------------------------"]


def notebook(exception: str, *places: str) -> Lines:
    """A traceback in a notebook. ``places``: how it names each place."""
    lines = ["-" * 75, f"{exception.partition(':')[0]:<42}Traceback (most recent call last)"]
    for place in places:
        lines += [place, "      1 import json", "      2 rows = {}", "----> 3 x = rows[k]", "      4 ", ""]
    return [*lines, exception]


FETCH = ["Traceback (most recent call last):", '  File "/w/more.py", line 30, in fetch', "    return open(path)"]
LOAD = ["Traceback (most recent call last):", '  File "/w/more.py", line 20, in load', "    return rows[key]", KEY]
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/data/b.json'"
OLD_OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity)"
PLACES: dict[str, tuple[Lines, str]] = {
    "the second of a group": (group(LOAD, [*FETCH, MISSING]), "in your code: /w/more.py:20 load"),
    "the first of a group": (group([*FETCH, MISSING], LOAD), "in your code: /w/more.py:30 fetch"),
    "memory, the second of a group": (group(LOAD, [*FETCH, OOM]), "in your code: /w/more.py:30 fetch"),
    "no places in a group": (
        group(["ValueError: row 3"], ["ValueError: row 9"]),
        "in your code: /w/train.py:90 <module>",
    ),
    "an old notebook": (notebook(KEY, "/w/data.py in load(k)"), "in your code: /w/data.py:3 load"),
    "an old cell": (
        notebook(KEY, "<ipython-input-3-abc> in <module>"),
        "in your code: <ipython-input-3-abc>:3 <module>",
    ),
    "a cell's file": (
        notebook(OLD_OOM, "/tmp/ipykernel_33/1.py in <module>"),
        "in your code: /tmp/ipykernel_33/1.py:3 <module>",
    ),
    "a cell": (notebook(KEY, "Cell In[7], line 3"), "in your code: Cell In[7]:3 <module>"),
    "two cells": (
        notebook(KEY, "Cell In[7], line 3", "Cell In[5], line 3, in step(b)"),
        "in your code: Cell In[5]:3 step",
    ),
    "an older cell": (notebook(KEY, "Input In [7], in <cell line: 3>()"), "in your code: Input In [7]:3 <module>"),
}
"""A log, and the place that stands beside its cause."""


def test_the_place_is_that_of_the_exception_that_is_told() -> None:
    shown = {name: diagnose(lines).findings[0].evidence for name, (lines, _) in PLACES.items()}

    assert {name: evidence for name, evidence in shown.items() if PLACES[name][1] not in evidence} == {}


def test_a_run_that_says_that_it_goes_on_and_does_is_well() -> None:
    refused = hook("ConnectionError: refused", "/w/upload.py", "put")
    full = hook("OSError: [Errno 28] No space left on device", "/w/upload.py", "put")
    for caught in (refused, full):
        well = [*STEPS, *MORE, *caught, "uploads are skipped from now on", "step 8 loss: 1.2000 lr: 0.0001"]
        assert not has_error(diagnose(well).findings)
        for log in ([*well, *ended(1)], [*STEPS, *MORE, *caught], well[:-1]):
            assert has_error(diagnose(log).findings)


def test_an_exception_that_is_not_taken_for_the_cause_is_shown() -> None:
    full = rooted("OSError: [Errno 28] No space left on device", 77, "save(model)")
    logs = {
        "ended": [*STEPS, *BORNE, *MORE, *ended(1)],
        "killed": [*STEPS, *BORNE, *MORE, *ended(-9)],
        "two processes": [*STEPS, *rooted("ValueError: bad row 5", 61), *MORE, *full, *ended(1, 1)],
    }
    shown = {name: " ".join(diagnose(lines).findings[0].evidence) for name, lines in logs.items()}

    assert [name for name, evidence in shown.items() if "ValueError: bad row 5, at /w/train.py" not in evidence] == []


def test_a_line_that_was_passed_over_says_why() -> None:
    hidden = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "/w/reader.py", line 9, in read']
    end = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "/w/train.py", line 9, in <module>']
    log = [*hidden, "[rank1]: OddError: one", *end, "[rank1]: ValueError: another"]

    first, *others = diagnose(log).findings

    assert "ValueError: another" in first.title
    notes = [one for one in others if one.rule == "passed-over"]
    assert [one.evidence for one in notes] == [
        ("line 3: OddError: one", "not the cause: it was caught: line 6 ended the same process")
    ]
