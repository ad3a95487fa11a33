"""Exceptions of users' code that no rule knows, in the forms in which programs print them: form x label x what is cut off.

``python -m tests.diagnosis.exceptions [--names N]`` prints how often the verdict lacks its own words, its place or its rank.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.finding import Severity
from tests.diagnosis.reading import NO_RULE, diagnose

Lines = tuple[str, ...]
BEGIN = "Traceback (most recent call last):"
MAIN = ('  File "/w/train.py", line 88, in <module>', "    main()")
USER = ('  File "/w/shards/table.py", line 61, in read_table', "    row = self.rows[key]")
SITE = "/v/lib/python3.11/site-packages"
PLACE = "/w/shards/table.py:61"
KEY = "KeyError: 'speaker_embedding'"
HANDLING = ("", "During handling of the above exception, another exception occurred:", "")
CAUSE = ("", "The above exception was the direct cause of the following exception:", "")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an exception is printed, the words by which it has to be told, and the place; "" where none is printed."""

    name: str
    lines: Lines
    words: tuple[str, ...]
    place: str = PLACE


def raised(*tail: str) -> Lines:
    """A traceback of the user's code."""
    return (BEGIN, *MAIN, *USER, *tail)


def library(name: str, *tail: str) -> Lines:
    """One that ends in a library."""
    return (BEGIN, *MAIN, *USER, f'  File "{SITE}/{name}", line 7, in get', "    return rows[key]", *tail)


FORMS = (
    Form(name="plain", lines=raised(KEY), words=("KeyError", "speaker_embedding")),
    Form(
        name="own class",
        lines=raised("shards.problems.HoleInTable: row 4711 is empty"),
        words=("HoleInTable", "row 4711"),
    ),
    Form(name="without words", lines=raised("shards.problems.HoleInTable"), words=("HoleInTable",)),
    Form(
        name="in a library",
        lines=library("tables/core.py", "ValueError: row 4711 has a hole"),
        words=("row 4711 has a hole",),
    ),
    Form(
        name="marked",
        lines=(BEGIN, *MAIN, "    ~~~~^^", USER[0], USER[1], "          ~~~~~~~~~^^^^^", KEY),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="shapes",
        lines=library(
            "torch/nn/functional.py",
            "RuntimeError: The size of tensor a (17) must match the size of tensor b (19) at non-singleton dimension 1",
        ),
        words=("tensor a (17)", "tensor b (19)"),
    ),
    Form(
        name="assertion of the model",
        lines=(
            BEGIN,
            *MAIN,
            USER[0],
            "    assert rows.shape[-1] == self.width, (rows.shape, self.width)",
            "AssertionError: (torch.Size([4, 17]), 19)",
        ),
        words=("AssertionError", "torch.Size([4, 17]), 19"),
    ),
    Form(
        name="bare assertion",
        lines=(BEGIN, *MAIN, USER[0], "    assert rows.shape[-1] == self.width", "AssertionError"),
        words=("AssertionError",),
    ),
    Form(
        name="while handling, put in words",
        lines=(
            *raised(KEY),
            *HANDLING,
            BEGIN,
            *MAIN,
            '  File "/w/shards/table.py", line 64, in read_table',
            '    raise HoleInTable("row 4711 is empty")',
            "shards.problems.HoleInTable: row 4711 is empty",
        ),
        words=("HoleInTable", "row 4711"),
        place="/w/shards/table.py:64",
    ),
    Form(
        name="while cleaning up",
        lines=(
            *raised(KEY),
            *HANDLING,
            BEGIN,
            *MAIN,
            '  File "/w/shards/table.py", line 70, in close',
            "    self.file.close()",
            "AttributeError: 'Table' object has no attribute 'file'",
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="direct cause",
        lines=(
            *raised(KEY),
            *CAUSE,
            BEGIN,
            *MAIN,
            '  File "/w/shards/table.py", line 64, in read_table',
            '    raise HoleInTable("row 4711 is empty") from error',
            "shards.problems.HoleInTable: row 4711 is empty",
        ),
        words=("HoleInTable", "row 4711"),
        place="/w/shards/table.py:64",
    ),
    Form(
        name="group",
        lines=(
            "  + Exception Group Traceback (most recent call last):",
            '  |   File "/w/train.py", line 88, in <module>',
            "  |     main()",
            "  | ExceptionGroup: two shards are bad (2 sub-exceptions)",
            "  +-+---------------- 1 ----------------",
            "    | Traceback (most recent call last):",
            '    |   File "/w/shards/table.py", line 61, in read_table',
            "    |     row = self.rows[key]",
            "    | KeyError: 'speaker_embedding'",
            "    +---------------- 2 ----------------",
            "    | Traceback (most recent call last):",
            '    |   File "/w/shards/table.py", line 62, in read_table',
            "    |     return row[7]",
            "    | IndexError: index 7 of 3",
            "    +------------------------------------",
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="syntax",
        lines=(
            BEGIN,
            '  File "/w/train.py", line 3, in <module>',
            "    import shards.table",
            '  File "/w/shards/table.py", line 61',
            "    rows = [",
            "           ^",
            "SyntaxError: '[' was never closed",
        ),
        words=("SyntaxError", "'[' was never closed"),
    ),
    Form(
        name="syntax of the script",
        lines=(
            '  File "/w/shards/table.py", line 61',
            "    rows = [",
            "           ^",
            "SyntaxError: '[' was never closed",
        ),
        words=("SyntaxError", "'[' was never closed"),
        place="",
    ),
    Form(
        name="several lines",
        lines=raised(
            "ValueError: these rows have holes:", "  row 4711: column 3", "  row 4712: column 9", "mend them first"
        ),
        words=("these rows have holes", "row 4711"),
    ),
    Form(
        name="notes",
        lines=raised(KEY, "While reading shard 17", "The index is of 2024-05-01"),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="rich",
        lines=(
            "╭───────────────────── Traceback (most recent call last) ──────────────────────╮",
            "│ /w/train.py:88 in <module>                                                   │",
            "│                                                                              │",
            "│   85                                                                         │",
            "│ ❱ 88 main()                                                                  │",
            "│                                                                              │",
            "│ /w/shards/table.py:61 in read_table                                          │",
            "│                                                                              │",
            "│   60 │   def read_table(self, key):                                          │",
            "│ ❱ 61 │   │   row = self.rows[key]                                             │",
            "│   62 │   │   return row                                                       │",
            "╰──────────────────────────────────────────────────────────────────────────────╯",
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="notebook",
        lines=(
            "---------------------------------------------------------------------------",
            "KeyError                                  Traceback (most recent call last)",
            "Cell In[7], line 3",
            "      1 table = Table('a')",
            "----> 3 table.read_table('speaker_embedding')",
            "",
            "File /w/shards/table.py:61, in Table.read_table(self, key)",
            "     60 def read_table(self, key):",
            "---> 61     row = self.rows[key]",
            "     62     return row",
            "",
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="old notebook",
        lines=(
            "KeyError                                  Traceback (most recent call last)",
            "<ipython-input-7-0a1b2c3d4e5f> in <module>",
            "----> 1 table.read_table('speaker_embedding')",
            "",
            "/w/shards/table.py in read_table(self, key)",
            "     60     def read_table(self, key):",
            "---> 61         row = self.rows[key]",
            "",
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="what",
        lines=("terminate called after throwing an instance of 'table::hole'", "  what():  row 4711 has a hole"),
        words=("table::hole", "row 4711"),
        place="",
    ),
    Form(
        name="panic",
        lines=(
            "thread '<unnamed>' panicked at src/table.rs:61:9:",
            "index out of bounds: the len is 3 but the index is 7",
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
            *raised("pyo3_runtime.PanicException: index out of bounds: the len is 3 but the index is 7"),
        ),
        words=("PanicException", "the len is 3"),
    ),
    Form(
        name="Spark",
        lines=(
            *raised("pyspark.errors.exceptions.captured.PythonException: "),
            "  An exception was thrown from the Python worker. Please see the stack trace below.",
            BEGIN,
            '  File "/w/shards/udf.py", line 9, in clean',
            "    return row['speaker_embedding']",
            KEY,
            "",
            "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)",
            "\tat java.base/java.lang.Thread.run(Thread.java:829)",
        ),
        words=("KeyError", "speaker_embedding"),
        place="/w/shards/udf.py:9",
    ),
    Form(
        name="DataLoader",
        lines=(
            BEGIN,
            *MAIN,
            f'  File "{SITE}/torch/_utils.py", line 750, in reraise',
            "    raise exception",
            "KeyError: Caught KeyError in DataLoader worker process 2.",
            "Original Traceback (most recent call last):",
            f'  File "{SITE}/torch/utils/data/_utils/worker.py", line 349, in _worker_loop',
            "    data = fetcher.fetch(index)",
            *USER,
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="spawn",
        lines=(
            BEGIN,
            *MAIN,
            f'  File "{SITE}/torch/multiprocessing/spawn.py", line 340, in spawn',
            "    return start_processes(fn, args)",
            "torch.multiprocessing.spawn.ProcessRaisedException: ",
            "",
            "-- Process 2 terminated with the following error:",
            BEGIN,
            f'  File "{SITE}/torch/multiprocessing/spawn.py", line 90, in _wrap',
            "    fn(i, *args)",
            *USER,
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="pool",
        lines=(
            "multiprocess.pool.RemoteTraceback: ",
            '"""',
            BEGIN,
            f'  File "{SITE}/multiprocess/pool.py", line 125, in worker',
            "    result = (True, func(*args, **kwds))",
            *USER,
            KEY,
            '"""',
            *CAUSE,
            BEGIN,
            *MAIN,
            f'  File "{SITE}/datasets/arrow_dataset.py", line 3166, in map',
            "    for rank, done, content in iflatmap_unordered(",
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="data set's generation",
        lines=(
            *raised(KEY),
            *CAUSE,
            BEGIN,
            *MAIN,
            f'  File "{SITE}/datasets/builder.py", line 1898, in _prepare_split_single',
            '    raise DatasetGenerationError("An error occurred while generating the dataset") from e',
            "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="Ray",
        lines=(
            BEGIN,
            *MAIN,
            "ray.exceptions.RayTaskError(KeyError): ray::Worker.run() (pid=4711, ip=10.0.0.1)",
            *USER,
            KEY,
        ),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="logged at the end",
        lines=("2026-11-22 10:00:07,123 ERROR train: training failed", *raised(KEY)),
        words=("KeyError", "speaker_embedding"),
    ),
    Form(
        name="tokenizer",
        lines=library(
            "tokenizers/__init__.py",
            "TypeError: TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]",
        ),
        words=("TextEncodeInput must be",),
    ),
)
"""What ends rank 2."""

LABELS = {
    "none": "",
    "rank": "[rank2]: ",
    "local": "[default2]:",
    "both": "[default2]:[rank2]: ",
    "srun": "2: ",
    "MPI": "[1,2]<stderr>:",
    "node": "node-1: [rank2]: ",
    "clock": "2026-11-21T08:50:53.123Z ",
    "clock, rank": "2026-11-21 08:50:53,123 [rank2]: ",
    "pod": "[pod/train-worker-2/pytorch] ",
    "docker": "trainer_2  | ",
}
RANKS = {"rank", "local", "both", "srun", "MPI", "node", "clock, rank"}
"""Labels that say which rank it is."""


def steps(label: str) -> list[str]:
    """Lines of training, long enough that a number in front of each is known for a label."""
    return [f"{label}step {number}/900 loss 1.{number}" for number in range(1, 24)]


LAUNCHERS = {
    "nothing": [],
    "torchrun": [
        "E1122 10:00:09.334000 41200 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 2 "
        "(pid: 41235) of binary: /opt/conda/bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 2 (local_rank: 2)",
        "  exitcode  : 1 (pid: 41235)",
    ],
    "deepspeed": [
        "[2026-11-22 10:00:00,100] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 69504",
        "[2026-11-22 10:00:00,100] [ERROR] [launch.py:325:sigkill_handler] ['python', 'x.py'] exits with return code = 1",
    ],
}
CUTS = ("whole", "no beginning", "only the last lines")


def log_of(form: Form, label: str, launcher: str, cut: str) -> list[str]:
    """The log. ``cut``: what the file has lost."""
    own = [LABELS[label] + line for line in form.lines]
    if cut == "no beginning":
        return [*own[1:], *LAUNCHERS[launcher]]
    if cut == "only the last lines":
        return [*own[-1:], *LAUNCHERS[launcher]]
    return [*steps(LABELS[label]), *own, *LAUNCHERS[launcher]]


def cases() -> Iterator[tuple[Form, str, str, str]]:
    """All of them."""
    for form in FORMS:
        for label in LABELS:
            for launcher in LAUNCHERS:
                for cut in (cut for cut in CUTS if can_be_known(form, cut)):
                    yield form, label, launcher, cut


KNOWN_AS = {
    *NO_RULE,
    "script-raised",
    "data-worker-failed",
    "dataset-unreadable",
    "shapes-differ",
}
"""Rules that tell such an exception in its own words."""


def can_be_known(form: Form, cut: str) -> bool:
    """Whether what is left of an exception shows that it is one."""
    last = form.lines[-1]
    if cut == "whole":
        return True
    if cut == "no beginning":
        return (
            form.lines[0] == BEGIN
            and "Error: " in " ".join(form.lines)
            and HANDLING[1] not in form.lines
            and CAUSE[1] not in form.lines
        )
    return ": " in last and last.partition(": ")[0].endswith("Error") and not last.startswith((" ", "\t"))


def wrong_with(form: Form, label: str, launcher: str, cut: str) -> str:
    """What is wrong with a verdict; "" where nothing is."""
    found = diagnose(log_of(form, label, launcher, cut)).findings
    first = next((one for one in found if one.severity is Severity.ERROR), None)
    if first is None:
        return "no error"
    told = " ".join([first.title, *first.evidence])
    if cut != "only the last lines" and not all(word in told for word in form.words):
        return f"not its words: {first.rule}: {first.title}"
    if first.rule not in KNOWN_AS:
        return f"another cause: {first.rule}: {first.title}"
    if cut == "whole" and form.place not in told:
        return f"not its place: {first.title}"
    if cut == "whole" and label in RANKS and not first.title.startswith(("rank 2: ", "local rank 2: ")):
        return f"not its rank: {first.title}"
    if cut == "whole" and form.name != "what" and "step 23" not in told:
        return f"not its step: {first.title}"
    return "" if first.fix and first.fix.text.count("?") <= 1 else "no question, or several"


def wrong(every: int = 1, start: int = 0) -> list[tuple[str, str, str, str, str]]:
    """Form, label, launcher, cut, and what is wrong."""
    found = [(*one, wrong_with(*one)) for one in [*cases()][start::every]]
    return [(one[0].name, *one[1:]) for one in found if one[4]]


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=0)
    options = parser.parse_args()
    found = wrong()
    print(f"{len(found)} of {sum(1 for _ in cases())} are told wrongly")
    for (form, told), times in Counter((one[0], one[4]) for one in found).most_common(options.names or 20):
        print(f"{times:>5} {form:<28} {told[:200]}")
    for column in (1, 2, 3):
        print(dict(Counter(one[column] for one in found)))


if __name__ == "__main__":
    main()
