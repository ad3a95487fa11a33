"""Planted hangs under the real watch: ``python -m benchmarks.hang [--only KIND,...] [--stages 0,3] [--json FILE]``.

From the repository's root. Every case is some gloo ranks of tests/hang/train.py, a script that knows nothing of dsdoctor, with
``--hang-after 6``. Told are the seconds from the mistake to the verdict, the verdict, and whether it has the right rule,
rank and words. Needs DeepSpeed.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from tests.hang.planted import AFTER, CAUSES, QUIET, all_cases, full_folder, run_all

LEFT_OUT = {"text", "tail", "words", "folder"}


def write(path: Path, results: list[dict[str, object]]) -> None:
    """The figures so far: a run that is ended leaves those that it has."""
    document = {
        "what": __doc__.splitlines()[0],
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "hang_after": AFTER,
        "cases": [{k: v for k, v in result.items() if k not in LEFT_OUT} for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--ranks", default="3")
    parser.add_argument("--steps", default="3")
    parser.add_argument("--on", default="1")
    parser.add_argument("--json", default="")
    parser.add_argument("--text", action="store_true", help="show what was printed in cases that are not ok")
    given = parser.parse_args()
    numbers = [list(map(int, value.split(","))) for value in (given.stages, given.ranks, given.steps, given.on)]
    kinds = given.only.split(",") if given.only else [*CAUSES, *QUIET]
    with full_folder() as folder:
        cases = list(all_cases(kinds, *numbers))
        for case in cases:
            case["folder"] = folder if "full_disk" in case["kind"] else ""
        results: list[dict[str, object]] = []
        for result in run_all(cases, show=given.text):
            results.append(result)
            if given.json:
                write(Path(given.json), results)
    good = sum(result["judged"] == "ok" for result in results)
    print(f"{good} of {len(results)} as planted")
    sys.exit(good < len(results))


if __name__ == "__main__":
    main()
