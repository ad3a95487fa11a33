"""The table of figures.md, made from what the benchmarks have written.

python docs/make_figures.py            writes it in place
python docs/make_figures.py --check    writes nothing; status 1 where the page shows something else
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- figures: made by docs/make_figures.py -->\n\n", "\n<!-- end of figures -->\n"
HEAD = "| claim | figure | n | script | numbers |\n|---|---|---|---|---|\n"
MEASURED_BY_ITSELF = {"explain"}
"""Commands whose first words are their answer."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim; ``figures`` gives its figure and n from what ``script`` wrote to ``numbers``."""

    claim: str
    script: str
    numbers: str
    figures: Callable[[Any], tuple[str, str]]


def check(told: Any) -> tuple[str, str]:
    measured = next(iter(told["environments"].values()))
    return f"{measured['median_ratio_of_pairs']} of ds_report's time", f"{measured['runs']} pairs of runs"


def first_words(told: Any) -> tuple[str, str]:
    said = [words for name, words in told["first_words"].items() if name not in MEASURED_BY_ITSELF]
    warm, cold = (max(words[key] for words in said) for key in ("seconds", "cold_seconds"))
    return (
        f"first words at most {warm * 1e3:.0f} ms after the start, {cold:.2f} s with nothing compiled",
        f"{len(said)} commands",
    )


def start(told: Any) -> tuple[str, str]:
    over = told["start_over_python"]
    names = ("check, until its first question", "explain RULE", "explain RULE, of a log", "import cyclopts")
    until, page, longest, parser = (over[name]["cpu_ms"] for name in names)
    return (
        f"over Python's own start `check` takes {until:.0f} ms of a processor to its first question, `explain` {page:.0f} to "
        f"{longest:.0f} in all; {parser:.0f} of them are cyclopts",
        f"{told['runs']} pairs of runs",
    )


def build(told: Any) -> tuple[str, str]:
    cold, unchanged = (max(run["ratio"][name]["wall"] for run in told["runs"]) for name in ("cold", "nothing changed"))
    rounds = sum(run["rounds"] for run in told["runs"])
    return f"at most {cold:.2f} of the time, {unchanged:.2f} when nothing changed", f"{rounds} rounds"


def configurations(told: Any) -> tuple[str, str]:
    table = told["table"]
    return (
        f"{table['bad_named']} of {table['bad']} bad configurations, {table['healthy_alarmed']} alarms on "
        f"{table['healthy']} healthy ones",
        f"{len(told['rows'])}, and {told['mechanical']['all']:,} misspelt keys",
    )


def memory(told: Any) -> tuple[str, str]:
    points = told["summary"].values()
    near, every = sum(point["within 5 %"] for point in points), sum(point["n"] for point in points)
    worst = max(point["worst"] for point in points)
    return (
        f"{near:,} of {every:,} points of a step within 5 %, the worst {100 * worst:.1f} %",
        f"{told['cases']} cases, {len(told['rows'])} ranks",
    )


def overflow(told: Any) -> tuple[str, str]:
    return (
        f"kind, module and rank {told['right']} of {told['cases']}, a wrong line {told['wrong_line']} times",
        f"{told['cases']} planted faults",
    )


def overflow_cost(told: Any) -> tuple[str, str]:
    shares = {
        way: [row["inside_percent"] for row in told["rows"] if row["way"] == way]
        for way in ("guard", "frames, engine", "transformers")
    }
    spans = [f"{min(shares[way]):.2g} to {max(shares[way]):.2g} %" for way in shares]
    return (
        f"guard {spans[0]} of a step, frames {spans[1]}; transformers' class {spans[2]}",
        f"3 models, {told['steps']} steps",
    )


def checkpoints(told: Any) -> tuple[str, str]:
    unknown = told["verdicts"]["not known"]
    return f'{told["wrong"]} wrong verdicts, {unknown} "not known"', f"{told['cases']} saved and loaded"


def merge(told: Any) -> tuple[str, str]:
    peaks = {
        tool: max(peak for row in told["rows"] if row["tool"] == tool for peak in row["peak_mib"])
        for tool in ("dsdoctor checkpoint --merge", "zero_to_fp32.py")
    }
    ours, theirs = peaks.values()
    return f"{ours:,} MiB where zero_to_fp32 takes {theirs:,}", f"a checkpoint of {told['gigabytes']:.0f} GB"


def paired(told: Any) -> tuple[str, str]:
    found = f"{len(told['not_equal'])} differences, {len(told['false_verdicts'])} false verdicts"
    return found, f"{len(told['pairs'])} pairs of runs of {told['scripts']} scripts"


def hang(told: Any) -> tuple[str, str]:
    look, supervisor = told["milliseconds of one look"]["moving"], told["supervisor with 8 ranks"]["processor %"]
    return f"{look:.2f} ms a look, {supervisor:.1f} % of a processor for 8 ranks", "one node"


ROWS = (
    Row(claim="`check` is quick", script="check.py", numbers="check-2026-11-23.json", figures=check),
    Row(
        claim="a terminal is never silent",
        script="startup.py",
        numbers="startup-2026-11-23.json",
        figures=first_words,
    ),
    Row(claim="a command starts at once", script="startup.py", numbers="startup-2026-11-23.json", figures=start),
    Row(
        claim="`build-wheel` compared with the guide's build",
        script="build.py",
        numbers="build-2026-11-23-late-collection.json",
        figures=build,
    ),
    Row(
        claim="`config` names what is wrong",
        script="config.py",
        numbers="config-2026-11-22.json",
        figures=configurations,
    ),
    Row(
        claim="`memory` predicts what is held",
        script="memory.py",
        numbers="memory-2026-11-22.json",
        figures=memory,
    ),
    Row(
        claim="the first inf is named",
        script="overflow_faults.py",
        numbers="overflow-faults-2026-11-22.json",
        figures=overflow,
    ),
    Row(
        claim="also in faults of other kinds",
        script="overflow_unplanned.py",
        numbers="overflow-unplanned-2026-11-23.json",
        figures=overflow,
    ),
    Row(
        claim="the overflow watch costs little",
        script="overflow.py",
        numbers="overflow-2026-11-23.json",
        figures=overflow_cost,
    ),
    Row(
        claim="a checkpoint loads, or does not",
        script="checkpoint.py",
        numbers="checkpoint-2026-11-22.json",
        figures=checkpoints,
    ),
    Row(
        claim="a merge takes little memory",
        script="checkpoint_merge.py",
        numbers="checkpoint-merge-2026-11-22.json",
        figures=merge,
    ),
    Row(
        claim="the hang watch costs little",
        script="hang_cost.py",
        numbers="hang-cost-2026-11-22.json",
        figures=hang,
    ),
    Row(
        claim="scripts run with and without `dsdoctor.run`",
        script="paired_runs.py",
        numbers="paired-runs-2026-11-23.json",
        figures=paired,
    ),
)


def table() -> Iterator[str]:
    """A line of the table for each claim."""
    for row in ROWS:
        figure, count = row.figures(json.loads((RESULTS / row.numbers).read_text(encoding="utf-8")))
        yield f"| {row.claim} | {figure} | {count} | `{row.script}` | `{row.numbers}` |\n"


def page(text: str) -> str:
    """The page with the table as the files tell it."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return "".join([before, BEGIN, HEAD, *table(), END, after])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether the table is stale")
    given = parser.parse_args()
    shown = PAGE.read_text(encoding="utf-8")
    made = page(shown)
    if not given.check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != shown:
        print(f"{PAGE.relative_to(ROOT)}: its table is stale; python docs/make_figures.py makes it anew")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
