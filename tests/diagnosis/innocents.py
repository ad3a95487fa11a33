"""A rule's own lines where they are innocent: caught, tried again, from an earlier run, of another program; alone, or before and
behind an exception that no rule knows.

``python -m tests.diagnosis.innocents [--every N] [--names N]`` prints how often such lines are told as the cause.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from zlib import crc32

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.catalogue import RULES, Signature, Tier
from dsdoctor.diagnosis.lines import EXCEPTION_LINE, is_said
from tests.diagnosis.mixtures import BANNER, TORCHRUN, alone, named
from tests.diagnosis.reading import NO_RULE, diagnose

Lines = list[str]
CLOCK = "2026-11-22 10:00:07,123"
RAISED = ["Traceback (most recent call last):", '  File "/w/parts/watch.py", line 90, in watch', "    self.look()"]


def steps(first: int, last: int, rank: int = 2) -> Lines:
    """Lines of training."""
    return [f"[rank{rank}]: step {number}/900 loss 1.{number}" for number in range(first, last)]


def ending(exception: str, *frames: str) -> Lines:
    """A traceback of the user's code, of rank 2."""
    told = ["Traceback (most recent call last):", '  File "/w/train.py", line 88, in <module>', "    main()", *frames]
    return [f"[rank2]: {line}" for line in [*told, exception]]


TABLE = ('  File "/w/shards/table.py", line 61, in read_table', "    return self.rows[key]")
LIBRARY = (
    *TABLE,
    '  File "/v/lib/python3.10/site-packages/tables/core.py", line 7, in get',
    "    return rows[key]",
)
ENDS: dict[str, tuple[Lines, str, str]] = {
    "key": (ending("KeyError: 'speaker_embedding'", *TABLE), "KeyError: 'speaker_embedding'", "/w/shards/table.py:61"),
    "own class": (
        ending("shards.problems.HoleInTable: row 4711 of table 17 is empty", *TABLE),
        "HoleInTable: row 4711 of table 17 is empty",
        "/w/shards/table.py:61",
    ),
    "in a library": (
        ending("ValueError: row 4711 of table 17 has a hole", *LIBRARY),
        "ValueError: row 4711 of table 17 has a hole",
        "/w/shards/table.py:61",
    ),
    "cut": (
        [
            f"[rank2]: {line}"
            for line in ("Traceback (most recent call last):", *TABLE, "KeyError: 'speaker_embedding'")
        ],
        "KeyError: 'speaker_embedding'",
        "/w/shards/table.py:61",
    ),
    "assertion": (
        ending("AssertionError: 17 rows of 4711", *TABLE[:1], "    assert rows == wanted, f'{rows} rows of {wanted}'"),
        "AssertionError: 17 rows of 4711",
        "/w/shards/table.py:61",
    ),
}
"""What really ended the run, on rank 2: its lines, its words, and the user's frame."""


def raising(text: str, *, where: str = "watch") -> Lines:
    """The line as a traceback ends with it, where it is an exception; else as it is. ``where``: the function that caught it."""
    lines = [line.replace("in watch", f"in {where}") for line in RAISED]
    return [*lines, text] if EXCEPTION_LINE.match(text) else [text]


def logged(text: str, head: str) -> Lines:
    """What a logger writes of an error that was caught."""
    return (
        [f"{head}the look failed", *RAISED, text] if EXCEPTION_LINE.match(text) else [f"{head}the look failed: {text}"]
    )


ANEW = [
    "W1122 10:00:09.334000 41200 torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. 2/3 attempts "
    "left; will restart worker group",
    "I1122 10:00:09.434000 41200 torch/distributed/elastic/agent/server/api.py:707] [default] Starting worker group",
    "I1122 10:00:09.534000 41200 torch/distributed/elastic/agent/server/api.py:525] [default] Rendezvous complete for workers. "
    "Result:",
    "  restart_count=1",
]
KINDS: dict[str, Callable[[str], Lines]] = {
    "caught": lambda text: [*logged(text, f"{CLOCK} ERROR watch: "), *steps(2, 7)],
    "caught, said so": lambda text: [*logged(text, f"{CLOCK} ERROR watch: "), "going on without the watch"],
    "root logger": lambda text: [*logged(text, "ERROR:root:"), *steps(2, 7)],
    "tried again": lambda text: [*raising(text), "attempt 1 of 3 failed, trying again in 5 s", "attempt 2 of 3: ok"],
    "retrying": lambda text: [*raising(text), "Retrying in 5.0 seconds...", "Succeeded after 2 attempts."],
    "skipped": lambda text: [*raising(text), "batch 17 is skipped"],
    "falling back": lambda text: [*raising(text), "Falling back to the slow implementation"],
    "elastic": lambda text: [*raising(text), *ANEW, *steps(2, 7)],
    "earlier job": lambda text: [
        *raising(text),
        "======== requeued: SLURM_RESTART_COUNT=1, node g033 ========",
        *BANNER,
        *steps(1, 6),
    ],
    "tests before": lambda text: [
        "============================= test session starts ==============================",
        "collected 4 items",
        "tests/test_watch.py::test_watch ",
        *raising(text),
        "PASSED",
        "============================== 4 passed in 0.12s ===============================",
        *BANNER,
        *steps(1, 6),
    ],
    "wandb": lambda text: [f"wandb: ERROR {text}", *steps(2, 7)],
    "another program": lambda text: [
        f'ts=2026-11-22T10:00:07Z level=error component=agent msg="{text.replace(chr(34), chr(39))}"'
    ],
    "tensorboard": lambda text: [f"E1122 10:00:07.117000 140000 tensorboard/sender.py:12] {text}", *steps(2, 7)],
    "rooted": lambda text: [*raising(text, where="<module>"), *steps(2, 7)],
    "rooted, tried again": lambda text: [*raising(text, where="<module>"), "Will retry in 3 s", "connected"],
    "reconnected": lambda text: [*raising(text), "reconnecting ...", "connection is back"],
    "not fatal": lambda text: [
        *logged(text, f"{CLOCK} ERROR watch: non-fatal: "),
        f"{CLOCK} ERROR watch: the watch is disabled",
    ],
    "default": lambda text: [*raising(text), "using the default instead"],
    "given up": lambda text: [*raising(text), "giving up on shard 17, taking the next one"],
    "probe": lambda text: [
        "+ python probe.py || true",
        *raising(text, where="<module>"),
        "+ torchrun train.py",
        *BANNER,
        *steps(1, 6),
    ],
    "thread": lambda text: ["Exception in thread Thread-7 (_send):", *raising(text), *steps(2, 7)],
    "asyncio": lambda text: [
        "Task exception was never retrieved",
        "future: <Task finished name='Task-7'>",
        *raising(text),
        *steps(2, 7),
    ],
}
"""How a rule's lines stand in a run that they did not end."""


def on(rank: int, lines: Lines) -> Lines:
    """The lines of a rank; those of the launcher, of steps and of the banner bear a label or need none."""
    return [
        line if line.startswith(("[rank", "[2026", "W11", "I11", "+ ", "====")) else f"[rank{rank}]: {line}"
        for line in lines
    ]


def without_steps(lines: Lines) -> Lines:
    """Lines without those of the training."""
    return [line for line in lines if not line.startswith("[rank2]: step")]


PLACES: dict[str, Callable[[Lines, Lines], Lines]] = {
    "long before": lambda said, end: [*BANNER, *steps(1, 2), *on(2, said), *steps(7, 12), *end, *TORCHRUN],
    "before": lambda said, end: [*BANNER, *steps(1, 2), *on(2, said), *end, *TORCHRUN],
    "another rank": lambda said, end: [*BANNER, *steps(1, 2), *on(0, said), *end, *TORCHRUN],
    "alone": lambda said, end: alone([*BANNER, *steps(1, 2), *said, *steps(7, 12), *end]),
    "alone, before": lambda said, end: alone([*BANNER, *steps(1, 2), *said, *end]),
    "behind, another rank": lambda said, end: [*BANNER, *steps(1, 7), *end, *on(5, without_steps(said)), *TORCHRUN],
}
END = ["[rank2]: {'train_runtime': 123.4, 'train_samples_per_second': 1.2, 'train_loss': 1.2, 'epoch': 1.0}"]
RUNS: dict[str, Callable[[Lines], Lines]] = {
    "ended well": lambda said: [*BANNER, *steps(1, 2), *on(2, said), *steps(7, 99), *END],
    "goes on": lambda said: [*BANNER, *steps(1, 2), *on(2, said), *steps(7, 99)],
    "alone": lambda said: alone([*BANNER, *steps(1, 2), *said, *steps(7, 99)]),
    "without steps": lambda said: alone([*BANNER, *said, *END]),
}


def wordings() -> Iterator[tuple[str, Signature, str]]:
    """Wordings of one line that may be a cause, and that no tool prints as a warning."""
    for rule in RULES.values():
        for signature in rule.signatures:
            if signature.tier <= Tier.GENERIC and not signature.after and not is_said(signature.sample.encode()):
                yield rule.id, signature, named(signature.sample.split("\n")[-1])


def first_error(lines: Lines) -> tuple[str, str]:
    """The rule that is named first, and its title."""
    return next(((one.rule, one.title) for one in diagnose(lines).findings if one.severity is Severity.ERROR), ("", ""))


UNTOLD = "given up"
"""Words of going on that the tool does not know: how it does where only the tracebacks decide."""


def cases(every: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Rule, its line, surrounding, place, what ended the run."""
    for rule, signature, text in wordings():
        table = [(kind, place, end) for kind in KINDS for place in PLACES for end in ENDS]
        for kind, place, end in table[crc32(signature.sample.encode()) % every :: every]:
            yield rule, text, kind, place, end


def wrong(every: int = 1) -> Iterator[tuple[str, str, str, str, str]]:
    """Surrounding, place, what ended the run, the innocent rule, what was told instead of the end's own words and frame."""
    for rule, text, kind, place, end in cases(every):
        lines, words, frame = ENDS[end]
        told, title = first_error(PLACES[place](KINDS[kind](text), lines))
        if told not in {*NO_RULE, "script-raised"} or words not in title or frame not in title:
            yield kind, place, end, rule, f"{told}: {title[:150]}"


def idle(every: int) -> Iterator[tuple[str, str, str, str]]:
    """Rule, its line, surrounding, run."""
    for rule, signature, text in wordings():
        table = [(kind, run) for kind in KINDS for run in RUNS]
        for kind, run in table[crc32(signature.sample.encode()) % every :: every]:
            yield rule, text, kind, run


def alarms(every: int = 1) -> Iterator[tuple[str, str, str, str, str]]:
    """Surrounding, run, innocent rule, what was told of a run that is well."""
    for rule, text, kind, run in idle(every):
        told, title = first_error(RUNS[run](KINDS[kind](text)))
        if told:
            yield kind, run, rule, rule, f"{told}: {title[:150]}"


INNOCENT = "KeyError: 'speaker_embedding'"


def known(text: str) -> Lines:
    """The end of rank 2 by what a rule knows."""
    return ending(text, *LIBRARY) if EXCEPTION_LINE.match(text) else [f"[rank2]: {text}"]


def swapped(every: int) -> Iterator[tuple[str, str, str, str]]:
    """Rule, its line, surrounding of an unknown exception, place: the rule's line is what ended the run."""
    for rule, signature, text in wordings():
        table = [(kind, place) for kind in KINDS for place in PLACES]
        for kind, place in table[crc32(signature.sample.encode()) % every :: every]:
            yield rule, text, kind, place


def missed(every: int = 1) -> Iterator[tuple[str, str, str, str, str]]:
    """Surrounding, place, the rule, twice, and what was told instead of it, though it is told without the unknown."""
    for rule, text, kind, place in swapped(every):
        alone_told, _ = first_error(PLACES[place]([], known(text)))
        told, title = first_error(PLACES[place](KINDS[kind](INNOCENT), known(text)))
        if told != alone_told:
            yield kind, place, rule, rule, f"{told}: {title[:150]}"


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--names", type=int, default=0)
    options = parser.parse_args()
    for title, found, tried in (
        ("ends told wrongly", list(wrong(options.every)), sum(1 for _ in cases(options.every))),
        ("known ends lost", list(missed(options.every)), sum(1 for _ in swapped(options.every))),
        ("alarms in runs that are well", list(alarms(options.every)), sum(1 for _ in idle(options.every))),
    ):
        print(f"{len(found)} of {tried} {title}")
        print("   ", dict(Counter(one[0] for one in found).most_common(20)))
        for place, times in Counter((one[0], one[1]) for one in found).most_common(60):
            print(f"{times:>5} {place[0]:<20}{place[1]:<24}")
        for one in found[: options.names]:
            print("   ", *one)


if __name__ == "__main__":
    main()
