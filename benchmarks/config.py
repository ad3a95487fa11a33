"""Configurations: what `dsdoctor config` says, beside what a real deepspeed.initialize and two steps on the CPU make of them.

    python benchmarks/config.py [--out benchmarks/results/config-DATE.json] [--combinations]

And every mistake that can be made mechanically (each key that DeepSpeed reads, misspelt in eight ways, in another section, with
text for a number), each to be named with the right key; and each parameter of each optimizer and scheduler with a text that nobody
knows, beside what two real steps make of it. One process goes through all of it; three to four minutes on one core.

--combinations: nearly a thousand configurations made of parts, each key and value of which DeepSpeed knows.
"""

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.config.cases import bad, healthy
from tests.config.combinations import combinations, outcomes
from tests.config.many import ask_many
from tests.config.mistakes import keys_moved_in, keys_moved_out, mistakes_of_kind, typing_mistakes
from tests.config.parameter_texts import texts
from tests.config.table import Row, table
from tests.config.test_mistakes import unnamed
from tests.config.test_parameters import disagreeing

PIECE = 250
"""Combinations that one process goes through."""
RESULTS = Path(__file__).with_name("results")


def mechanical() -> dict[str, Any]:
    """How many mistakes of each kind there are, and how many were not named with the right key."""
    asked = ask_many([{"train_batch_size": 8}])[0]
    every = [*typing_mistakes(asked), *mistakes_of_kind(asked), *keys_moved_out(asked), *keys_moved_in(asked)]
    missed = unnamed(every)
    return {"made": dict(Counter(each.kind for each in every)), "all": len(every), "not_named": missed}


def parameters() -> dict[str, Any]:
    """How many parameters of how many classes there are, and of which of them something else is said than what happens."""
    every = list(texts(ask_many([{"train_batch_size": 8}])[0]))
    return {
        "classes": sum(not each.path for each in every),
        "texts": sum(bool(each.path) for each in every),
        "disagree": disagreeing(every),
    }


def combined(out: Path, begun: float) -> int:
    """All combinations: stage x offload x type x optimizer, and each flag at each stage in each type."""
    cases = list(combinations())
    found = [each for start in range(0, len(cases), PIECE) for each in outcomes(cases[start : start + PIECE])]
    wrong = [asdict(each) for each in found if each.verdict in {"unseen", "alarm"}]
    figures = {
        **versions(),
        "combinations": len(found),
        "verdicts": dict(Counter(each.verdict for each in found)),
        "wrong": wrong,
        "seconds": round(time.monotonic() - begun),
        "rows": [asdict(each) for each in found],
    }
    out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in figures.items() if key != "rows"}, indent=1))
    return bool(wrong)


def versions() -> dict[str, str]:
    """What the figures hold for."""
    return {name: version(name) for name in ("deepspeed", "torch", "transformers")}


def summary(rows: list[Row]) -> dict[str, Any]:
    """The figures of the table."""
    wrong, well = [row for row in rows if row.expected], [row for row in rows if not row.expected]
    return {
        "bad": len(wrong),
        "bad_named": sum(row.expected in row.said for row in wrong),
        "bad_taken_in_silence_by_deepspeed": sum(not row.failed for row in wrong),
        "bad_that_fail_at_the_first_step": sum(row.failed == "step" for row in wrong),
        "healthy": len(well),
        "healthy_alarmed": sum(bool(row.said) for row in well),
        "disagree": [row.name for row in rows if not row.agrees],
    }


def main() -> int:
    """Try all, print the table, write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"config-{datetime.date.today():%Y-%m-%d}.json")
    parser.add_argument("--combinations", action="store_true", help="the combinations of parts alone; minutes")
    given = parser.parse_args()
    begun = time.monotonic()
    if given.combinations:
        return combined(given.out, begun)
    rows = table([*bad(), *healthy()])
    for row in rows:
        happens = row.failed or "silent"
        print(
            f"{'✓' if row.agrees else '✗'} {row.name:<52} {happens:<11} {', '.join(dict.fromkeys(row.said)) or 'nothing said'}"
        )
    figures = {
        **versions(),
        "table": summary(rows),
        "mechanical": mechanical(),
        "parameters": parameters(),
        "seconds": round(time.monotonic() - begun),
        "rows": [asdict(row) for row in rows],
    }
    given.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in figures.items() if key != "rows"}, indent=1))
    return any((figures["table"]["disagree"], figures["mechanical"]["not_named"], figures["parameters"]["disagree"]))


if __name__ == "__main__":
    sys.exit(main())
