"""python -m tests.fuzz [--seed TEXT] [--scale N] [READER FIRST LAST]: show what ends wrongly, and a table of what was tried.

Without a reader all of them, each with its share of 200,000 inputs times N.
"""

import argparse
import sys

from tests.fuzz.readers import READERS, SHARES
from tests.fuzz.run import Tally, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("reader", nargs="?", choices=[*READERS])
    parser.add_argument("first", nargs="?", type=int, default=0)
    parser.add_argument("last", nargs="?", type=int)
    parser.add_argument("--seed", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    wanted = [options.reader] if options.reader else [*READERS]
    found = 0
    print("reader | inputs | ended wrongly | CPU-s | longest | statuses", flush=True)
    for reader in wanted:
        tally, wrongly = Tally(), 0
        last = options.last if options.last is not None else options.first + round(SHARES[reader] * options.scale)
        for number, words, wrong in failures(reader, range(options.first, last), seed=options.seed, tally=tally):
            wrongly += 1
            print(f"== {reader} {number}: {' '.join(words or ())!a}\n{wrong}", flush=True)
        cost = f"{tally.seconds:.0f} | {tally.longest:.1f}"
        ended = " ".join(f"{status or 'read'}:{count}" for status, count in sorted(tally.statuses.items()))
        print(f"{reader} | {tally.inputs} | {wrongly} | {cost} | {ended}", flush=True)
        found += wrongly
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
