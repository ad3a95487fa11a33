"""Lines of real logs as nobody wrote them: numbers that are none, two lines in one, bytes of another text.

``python -m tests.diagnosis.mangled [--count N] [--seed N]`` prints what cannot be read.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator

from dsdoctor.diagnosis.catalogue import RULES
from tests.diagnosis.without_rules import Lines, broken, corpus, shapes, some_rules

NUMBER = re.compile(rb"\d+(?:\.\d+)?")
ODD_NUMBERS = (
    b"",
    b".",
    b"..",
    b"1.2.3",
    b"-",
    b"--1",
    b"-0",
    b"+7",
    b"0x1f",
    b"1e999",
    b"nan",
    b"-inf",
    b"1_000",
    b"1artitioning:",
    b"9" * 20,
    b"9" * 4400,
    "٣٤".encode(),
    "²".encode(),
    "½".encode(),
    b"12\xff",
    b"1\x00",
    b"1\r2",
    b"2147483648",
    b"{1}",
    b"%d",
)
SAMPLES = tuple(signature.sample.encode() for rule in RULES.values() for signature in rule.signatures)
Mangle = Callable[[bytes, random.Random], bytes]


def another(chance: random.Random) -> bytes:
    return chance.choice(shapes() if chance.random() < 0.7 else SAMPLES)


def odd_number(line: bytes, chance: random.Random) -> bytes:
    """One number, or the first eight, are none."""
    odd = chance.choice(ODD_NUMBERS)
    found = list(NUMBER.finditer(line))
    if not found or chance.random() < 0.3:
        return NUMBER.sub(lambda _: odd, line, count=8)
    one = chance.choice(found)
    return line[: one.start()] + odd + line[one.end() :]


def torn(line: bytes, chance: random.Random) -> bytes:
    """Another process wrote into the line."""
    at, other = chance.randrange(len(line) + 1), another(chance)
    return line[:at] + other[chance.randrange(len(other) + 1) :] + chance.choice((b"", line[at:]))


def torn_in_a_number(line: bytes, chance: random.Random) -> bytes:
    """Another process wrote into the line where a number stands."""
    found = list(NUMBER.finditer(line))
    if not found:
        return torn(line, chance)
    one, other = chance.choice(found), another(chance)
    at = chance.randint(one.start(), one.end())
    return line[:at] + other[chance.randrange(len(other) + 1) :]


def other_bytes(line: bytes, chance: random.Random) -> bytes:
    """Some bytes are any others."""
    changed = bytearray(line)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.randint(0, 2)] = bytes(chance.choices(range(256), k=chance.randint(0, 2)))
    return bytes(changed)


def twice(line: bytes, chance: random.Random) -> bytes:
    """A part of the line comes again, with an odd number in it."""
    first, last = sorted((chance.randrange(len(line) + 1), chance.randrange(len(line) + 1)))
    return line[:last] + odd_number(line[first:], chance)


KINDS: tuple[Mangle, ...] = (odd_number, odd_number, torn, torn_in_a_number, other_bytes, twice)


def mangled(count: int, seed: int) -> Iterator[tuple[str, Lines]]:
    """Short logs with mangled lines: single ones, samples of rules, and pieces of logs in which each third line is mangled."""
    chance = random.Random(seed)
    for number in range(count):
        if chance.random() < 0.5:
            lines = another(chance).split(b"\n")
        else:
            _, whole = chance.choice(corpus())
            first = chance.randrange(len(whole))
            lines = whole[first : first + chance.choice((2, 5, 20))]
        share = chance.choice((0.3, 1.0))
        changed = [chance.choice(KINDS)(line, chance) if chance.random() < share else line for line in lines]
        yield f"{seed}/{number}: {[line[:300] for line in changed]!r}"[:2000], changed


def main() -> None:
    """Print what cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = list(broken(mangled(options.count, options.seed), some_rules(1, 0)))
    for name, error in found[:20]:
        print(f"{name}:\n{error}\n")
    print(f"{len(found)} of {options.count} logs could not be read")


if __name__ == "__main__":
    main()
