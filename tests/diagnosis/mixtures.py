"""Failures with lines of other rules mixed in: as a warning, as talk, as a failure that was borne; before, behind, on other ranks.

``python -m tests.diagnosis.mixtures [--every N] [--names]`` prints how often such a line is taken for the cause, by kind and place.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from zlib import crc32

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.catalogue import RULES, Signature, Tier
from dsdoctor.diagnosis.lines import EXCEPTION_LINE, is_said
from dsdoctor.diagnosis.relations import A_FAILURE
from tests.diagnosis.reading import diagnose

Lines = list[str]
CLOCK = "2026-11-22 10:00:07,123"
STEPS = [f"[rank2]: step {number}/900 loss 1.{number}" for number in range(1, 6)]
BANNER = [
    f"[{CLOCK}] [INFO] [logging.py:128:log_dist] [Rank 0] DeepSpeed info: version=0.18.2, git-hash=unknown, git-branch=unknown",
    f"[{CLOCK}] [INFO] [comm.py:689:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl",
]
TORCHRUN = [
    "E1122 10:00:09.334000 41200 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 2 "
    "(pid: 41235) of binary: /opt/conda/bin/python",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "Root Cause (first observed failure):",
    "[0]:",
    "  rank      : 2 (local_rank: 2)",
    "  exitcode  : 1 (pid: 41235)",
]


def raised(*tail: str) -> Lines:
    """A traceback of rank 2."""
    lines = ["Traceback (most recent call last):", '  File "/w/train.py", line 88, in <module>', "    main()", *tail]
    return [f"[rank2]: {line}" for line in lines]


FAILURES = {
    "known": raised(
        '  File "/v/lib/python3.10/site-packages/accelerate/optimizer.py", line 165, in step',
        "    self.optimizer.step(closure)",
        "AttributeError: 'DummyOptim' object has no attribute 'step'",
    ),
    "unknown": raised(
        '  File "/w/train.py", line 61, in main',
        "    rate = done / seconds",
        "ZeroDivisionError: float division by zero",
    ),
    "own class": raised(
        '  File "/w/shards/table.py", line 61, in read_table',
        "    return self.rows[key]",
        "shards.problems.HoleInTable: row 4711 of table 17 is empty",
    ),
    "memory": raised(
        '  File "/w/train.py", line 61, in main',
        "    loss = engine(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.15 GiB of which "
        "1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use.",
    ),
}
"""What happened, on rank 2."""


def named(line: str) -> str:
    """A sample's line without the label of a rank or a clock of its own."""
    return line.lstrip().removeprefix("[rank0]: ")


A_TRACEBACK = ["Traceback (most recent call last):", '  File "/w/reader.py", line 90, in read', "    self.close()"]
KINDS: dict[str, Callable[[str], Lines]] = {
    "logged warning": lambda text: [f"[{CLOCK}] [WARNING] [utils.py:77:check] {text}"],
    "glog warning": lambda text: [f"W1122 10:00:07.117000 41200 torch/_logging/internal.py:12] {text}"],
    "Python's warning": lambda text: [
        f"/v/lib/python3.10/site-packages/thing/core.py:31: UserWarning: {text}",
        "  warnings.warn(",
    ],
    "talk": lambda text: [f"[{CLOCK}] [INFO] [utils.py:77:check] if it says '{text}', see the pages"],
    "borne": lambda text: [
        f"[{CLOCK}] [WARNING] [metrics.py:12:send] it goes on without: Traceback (most recent call last):",
        '  File "/w/metrics.py", line 12, in send',
        "    connection.request()",
        text,
    ],
    "ignored": lambda text: ["Exception ignored in: <function Reader.__del__ at 0x7f00>", *A_TRACEBACK, text],
    "survived": lambda text: [*A_TRACEBACK, text, *(f"step {number}/900 loss 1.{number}" for number in range(1, 6))],
    "printed": lambda text: [f"sample 3: how do I mend this? {text}"],
    "a plain warning": lambda text: [f"Warning: {text}"],
    "a note": lambda text: [f"note: {text}"],
    "rich warning": lambda text: [f"[10:00:07] WARNING  {text}          checks.py:77"],
    "structured warning": lambda text: [f"{CLOCK} [warning  ] {text} [checks]"],
    "JSON warning": lambda text: [
        '{"level": "WARNING", "logger": "checks", "event": "' + text.replace('"', "'") + '"}'
    ],
    "prose": lambda text: [f"tip of the day: you may see {text} on old machines"],
    "print": lambda text: [f"my notes: if '{text}' comes, ask Ann"],
    "help": lambda text: [f'  --retry N            how often to try again after "{text}" (default: 3)'],
    "configuration": lambda text: [f'  "known_problem": "{text}",'],
    "DeepSpeed's dump": lambda text: [
        f"[{CLOCK}] [INFO] [config.py:1003:print]   note ......................... {text}"
    ],
    "arguments": lambda text: [f"Namespace(lr=1e-05, note='{text}', epochs=3)"],
    "shell": lambda text: [f"+ grep -c '{text}' old.log"],
    "collecting": lambda text: [
        f"Collecting fixes@ file:///w/for/{text.replace(' ', '-')} (from -r requirements.txt (line 3))"
    ],
    "data": lambda text: ['{"prompt": "I get ' + text.replace('"', "'") + ' in my run", "answer": "try again"}'],
}
"""How the line of another rule is said by somebody who does not fail of it."""

ONLY_EXCEPTIONS = {"borne", "ignored", "survived", "printed", "data"}
UNSIGNED = {
    "survived",
    "printed",
    "data",
    "prose",
    "print",
    "help",
    "configuration",
    "arguments",
    "shell",
    "collecting",
}
"""Kinds whose lines no logger marks as its own."""


def on(rank: int, lines: Lines) -> Lines:
    """The lines of a rank."""
    return [f"[rank{rank}]: {line}" for line in lines]


def alone(lines: Lines) -> Lines:
    """The lines of the only process, without labels and launcher."""
    return [line.removeprefix("[rank2]: ") for line in lines]


PLACES: dict[str, Callable[[Lines, Lines], Lines]] = {
    "long before": lambda said, failed: [*BANNER, *on(2, said), *STEPS, *failed, *TORCHRUN],
    "just before": lambda said, failed: [*BANNER, *STEPS, *on(2, said), *failed, *TORCHRUN],
    "before, another rank": lambda said, failed: [*BANNER, *STEPS, *on(0, said), *failed, *TORCHRUN],
    "alone, long before": lambda said, failed: alone([*BANNER, *said, *STEPS, *failed]),
    "alone, just before": lambda said, failed: alone([*BANNER, *STEPS, *said, *failed]),
    "behind": lambda said, failed: [*BANNER, *STEPS, *failed, *on(2, said), *TORCHRUN],
    "behind, another rank": lambda said, failed: [*BANNER, *STEPS, *failed, *on(5, said), *TORCHRUN],
}


def places_of(kind: str, text: str) -> list[str]:
    """Where a line can be said so.

    Only an exception ends a traceback, and is known by its place at the head of a line. A process that failed goes on with
    nothing, and what stands just behind its exception may be the message's next line.
    """
    if kind in ONLY_EXCEPTIONS and not EXCEPTION_LINE.match(text):
        return []
    return [place for place in PLACES if place != "behind" or kind not in UNSIGNED]


def first_error(lines: Lines) -> str:
    """The rule that is named first."""
    return next((one.rule for one in diagnose(lines).findings if one.severity is Severity.ERROR), "")


def wordings() -> list[tuple[str, Signature]]:
    """Wordings that may be a cause, of one line, and that no tool prints as a warning."""
    return [
        (rule.id, signature)
        for rule in RULES.values()
        for signature in rule.signatures
        if signature.tier <= Tier.GENERIC and not signature.after and not is_said(signature.sample.encode())
    ]


def line_of(signature: Signature) -> str:
    """The line by which a wording is known."""
    return named(signature.sample.split("\n")[-1])


def sample(signature: Signature, cases: list[tuple[str, ...]], every: int) -> list[tuple[str, ...]]:
    """Every n-th case of a wording; which ones, its own text decides, so that a new wording does not exchange the others'."""
    return cases[crc32(signature.sample.encode()) % every :: every]


def mixtures(every: int = 1) -> Iterator[tuple[str, str, str, str, str]]:
    """Rule, its line, failure, kind, place."""
    for rule, signature in wordings():
        text = line_of(signature)
        cases = [(name, kind, place) for name in FAILURES for kind in KINDS for place in places_of(kind, text)]
        for name, kind, place in sample(signature, cases, every):
            yield rule, text, name, kind, place


def wrong(every: int = 1) -> Iterator[tuple[str, str, str, str, str]]:
    """Failure, kind, place, whose line was mixed in, what was named first: where that is not the failure's own rule."""
    right = {name: first_error([*BANNER, *STEPS, *failed, *TORCHRUN]) for name, failed in FAILURES.items()}
    for rule, text, name, kind, place in mixtures(every):
        told = first_error(PLACES[place](KINDS[kind](text), FAILURES[name]))
        if told != right[name]:
            yield name, kind, place, rule, told


END = ["[rank2]: {'train_runtime': 123.4, 'train_samples_per_second': 1.2, 'train_loss': 1.2, 'epoch': 1.0}"]
MORE = [f"[rank2]: step {number}/900 loss 1.{number}" for number in range(6, 100)]
RUNS: dict[str, Callable[[Lines], Lines]] = {
    "ended well": lambda said: [*BANNER, *on(2, said), *STEPS, *MORE, *END],
    "goes on": lambda said: [*BANNER, *STEPS, *on(2, said), *MORE],
    "near the end": lambda said: [*BANNER, *STEPS, *MORE, *on(2, said), "[rank2]: step 101/900 loss 1.3"],
}
"""Where in a run that is well something is said."""


def idle(every: int = 1) -> Iterator[tuple[str, str, str, str]]:
    """Rule, its line, kind, run: of lines with a word of failure; others are told by loggers in the first place."""
    for rule, signature in wordings():
        text = line_of(signature)
        if A_FAILURE.search(text):
            cases = [(kind, run) for kind in KINDS if places_of(kind, text) for run in RUNS]
            for kind, run in sample(signature, cases, every):
                yield rule, text, kind, run


def alarms(every: int = 1) -> Iterator[tuple[str, str, str, str]]:
    """Kind, run, whose line was said, what was named: where a run that is well is told to have failed."""
    for rule, text, kind, run in idle(every):
        if told := first_error(RUNS[run](KINDS[kind](text))):
            yield kind, run, rule, told


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    found, false = list(wrong(options.every)), list(alarms(options.every))
    print(f"{len(found)} of {sum(1 for _ in mixtures(options.every))} mixtures told wrongly")
    print(
        f"{len(false)} alarms in {sum(1 for _ in idle(options.every))} runs that are well: {dict(Counter(one[0] for one in false))}"
    )
    for place, times in sorted(Counter((one[0], one[1], one[2]) for one in found).items()):
        print(f"{place[0]:<10}{place[1]:<20}{place[2]:<24}{times:>6}")
    if options.names:
        for rule, times in Counter(one[3] for one in found).most_common():
            print(f"{times:>5} {rule}  -> {dict(Counter(one[4] for one in found if one[3] == rule).most_common(3))}")


if __name__ == "__main__":
    main()
