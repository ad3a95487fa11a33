"""Planted hangs under the real watch: ``python -m benchmarks.hang [--only KIND,...] [--stages 0,3] [--json FILE]``.

From the repository's root. Every case is some gloo ranks of tests/hang/train.py, a script that knows nothing of dsdoctor, with
``--hang-after 6``. Told are the seconds from the mistake to the verdict, the verdict, and whether it has the right rule,
rank, line and words. Every kind is made at every ZeRO stage; rank, step and number of ranks are spread (``--every``: each with
each). ``--alone``: the same without dsdoctor, one case a kind: what torch says by itself, and when, with a timeout of its own of 20
seconds. ``--json FILE`` holds the figures so far: the same command again goes on where it was ended, and ``--seconds N``
makes it end by itself. Needs DeepSpeed.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.hang.planted import (
    AFTER,
    CAUSES,
    QUIET,
    STAGES,
    TIMEOUT,
    UNPLANNED,
    UNPLANNED_AGAIN,
    UNPLANNED_QUIET,
    all_cases,
    full_folder,
    one_case,
    run_all,
    spread_cases,
    unplanned_cases,
)

Result = dict[str, Any]
LEFT_OUT = {"text", "tail", "words", "folder", "alone", "hangs"}
KEY = ("kind", "stage", "ranks", "step", "on")


def before(path: str) -> dict[str, Result]:
    """What a file holds of an earlier call."""
    return json.loads(Path(path).read_text()) if path and Path(path).exists() else {}


def write(path: str, part: str, results: list[Result]) -> None:
    """The figures so far: a run that is ended leaves those that it has."""
    document = {
        **before(path),
        "what": __doc__.splitlines()[0],
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "hang_after": AFTER,
        "timeout_alone": TIMEOUT,
        part: [{k: v for k, v in result.items() if k not in LEFT_OUT} for result in results],
    }
    beside = Path(f"{path}.{os.getpid()}")
    beside.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    beside.replace(path)


def chosen(given: argparse.Namespace) -> Iterable[Result]:
    """The cases that were asked for."""
    stages, ranks, steps, on = (
        [int(number) for number in value.split(",")] for value in (given.stages, given.ranks, given.steps, given.on)
    )
    if given.unplanned:
        return unplanned_cases(
            given.only.split(",") if given.only else [*UNPLANNED, *UNPLANNED_QUIET, *UNPLANNED_AGAIN]
        )
    kinds = given.only.split(",") if given.only else [*CAUSES, *QUIET]
    if given.alone:
        return alone_cases(kinds)
    return all_cases(kinds, stages, ranks, steps, on) if given.every else spread_cases(kinds, stages, ranks, steps)


def alone_cases(kinds: list[str]) -> list[Result]:
    """One case of each kind, at the highest stage where it hangs."""
    hanging = [kind for kind in kinds if kind in CAUSES]
    return [one_case(kind, max(STAGES.get(kind, [3])), 3, 3, 1) for kind in hanging]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--ranks", default="3,4")
    parser.add_argument("--steps", default="3,0,6")
    parser.add_argument("--on", default="0,1,2,3", help="with --every")
    parser.add_argument("--every", action="store_true", help="each rank, step and number of ranks with each")
    parser.add_argument("--unplanned", action="store_true", help="the kinds that the watch was not made for")
    parser.add_argument("--alone", action="store_true", help="without dsdoctor")
    parser.add_argument("--json", default="")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--text", action="store_true", help="show what was printed in cases that are not ok")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    part = "alone" if given.alone else "cases"
    results: list[Result] = list(before(given.json).get(part, []))
    have = {tuple(result[name] for name in KEY) for result in results}
    with full_folder() as folder:
        cases = [case for case in chosen(given) if tuple(case[name] for name in KEY) not in have]
        for case in cases:
            case["folder"] = folder if "full_disk" in case["kind"] else ""
        for result in run_all(cases, show=given.text, alone=given.alone, until=until):
            results.append(result)
            if given.json:
                write(given.json, part, results)
    good = sum(result["judged"] in {"ok", "alone", "no hang"} for result in results)
    print(f"{good} of {len(results)} as planted")
    sys.exit(good < len(results))


if __name__ == "__main__":
    main()
