"""How a document, a text, a line of a log and a file's bytes go wrong. Everything is made of a Random, so a number says it all."""

import copy
import functools
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from dsdoctor.diagnosis.catalogue import RULES

try:
    from re import _parser as regex_parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as regex_parser

MARK = "DSDOCTOR "
DEEP = 400
SURROGATE = "\udcff"
WORDS = """
0 -1 1e999 NaN null ² ١٢ 12.8 13.0+ 8.0;9.0 sm_90 ; , = : / ~ // %s {x} { ${HOME} ' " `id` $(id) -- - ../../.. .
https://u:p@h/x?token=y http://[::1 file:///x git+https:// C:\\x 💥 __import__('os') <script> [bold] [/] nan inf True none all
default auto native 3.12 0.19.8 1.2.3.4:99999 [::1] 100% 1,2 1_000 0x10 Ⅷ n[01-03] n[1-999999999] {} [1,2] -oProxyCommand=id
"""
TEXTS = (
    *WORDS.split(),
    *("", " ", "9" * 400, "9" * 5000, "x" * 20_000, "hf_" + "aB3" * 12, "é" * 50),
    *("\x00", "\x1b[31m", "\x1b]0;x\x07", "\u202e", "\ufeff", "a\nb", "\r", "\x0b", "\x85", "\u2028"),
)
NUMBERS = (0, -1, 1, 7, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 70, -(1 << 64), 10**400)
FLOATS = (float("nan"), float("inf"), -0.0, 1e308, -1e308, 5e-324, 1e-300, 0.1)


def value(random: Random, depth: int = 0) -> Any:
    """Anything that JSON can hold, and what it should not."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(TEXTS)
    if kind == 3:
        return random.choice([None, True, False])
    if kind == 4:
        return random.choice(NUMBERS)
    if kind == 5:
        return random.choice(FLOATS)
    if kind == 6:
        return "a\ud800b"
    if kind == 7:
        nested: Any = []
        for _ in range(random.choice([5, 90, DEEP])):
            nested = [nested] if random.random() < 0.5 else {"x": nested}
        return nested
    if depth > 2:
        return []
    if kind < 10:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(TEXTS)[:50]: value(random, depth + 1) for _ in range(random.randrange(4))}


def of_its_kind(old: Any, random: Random) -> Any:
    """Another value of the same type, which gets further than one of another type."""
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int):
        return random.choice((*NUMBERS[:9], old + 1, old - 1, -old, old * 1000))
    if isinstance(old, float):
        return random.choice((*FLOATS, old * 2, -old, old + 1, 0.0, 1e10))
    if isinstance(old, str):
        return random.choice((*TEXTS, old + "x", old[:-1], old + old, old[::-1], old.upper()))
    if isinstance(old, list):
        return random.choice(([], old + old, old[:1], old[::-1], old * 30))
    return dict(list(old.items())[: random.randrange(len(old) + 1)])


def places(part: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, each in inner:
        yield (*above, name)
        if len(above) <= 12:
            yield from places(each, (*above, name))


def mutated(part: Any, random: Random) -> Any:
    """The document with one value replaced, taken out, renamed, or put in the place of another. It is changed in place."""
    found = list(places(part))
    if not found:
        return value(random)
    way, other = random.choice(found), random.choice(found)
    holder = part
    for name in way[:-1]:
        holder = holder[name]
    old = holder[way[-1]]
    match random.randrange(12):
        case 0:
            del holder[way[-1]]
        case 1:
            given = part
            for name in other:
                given = given[name]
            holder[way[-1]] = copy.deepcopy(given)
        case 2 if isinstance(old, str):
            at = random.randrange(len(old) + 1)
            holder[way[-1]] = old[:at] + random.choice(TEXTS) + old[at + random.randrange(5) :]
        case 3 if isinstance(old, list):
            holder[way[-1]] = old * random.choice([0, 2, 50])
        case 4 if isinstance(old, str) and MARK in old:
            holder[way[-1]] = mutated_answer(old, random)
        case 5 if isinstance(holder, dict):
            holder[random.choice((*TEXTS, f"{way[-1]}x"))] = holder.pop(way[-1])
        case 6 | 7 | 8 | 9:
            holder[way[-1]] = of_its_kind(old, random)
        case _:
            holder[way[-1]] = value(random)
    return part


def mutated_answer(text: str, random: Random) -> str:
    """What a child printed, with something else in its JSON."""
    before, _, answer = text.rpartition(MARK)
    try:
        changed = json.loads(answer)
    except ValueError:
        return text
    for _ in range(random.randrange(1, 4)):
        changed = mutated(changed, random)
    return f"{before}{MARK}{json.dumps(changed)}"


def wrong(document: Any, random: Random) -> Any:
    """A copy of a document with one to twenty mutations."""
    changed = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3, 8])):
        changed = mutated(changed, random)
    return changed


def as_bytes(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def damaged(content: bytes, random: Random, *, near: int = 0) -> bytes:
    """Bytes changed, taken out, doubled, brought in, or the end cut off. ``near``: most of it so near to an end of the file."""
    changed = bytearray(content)
    for _ in range(random.choice([1, 2, 5, 20])):
        if not changed:
            break
        at = random.randrange(min(len(changed), near) if near and random.random() < 0.8 else len(changed))
        if near and random.random() < 0.4:
            at = len(changed) - 1 - at
        match random.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                changed[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256), changed[at] ^ 1])
            case 5:
                del changed[at : at + random.randint(1, 80)]
            case 6:
                changed[at : at + 8] = random.choice([b"\xff", b"\0", b"\x7f"]) * random.choice([2, 4, 8])
            case 7:
                begin = random.randrange(len(changed))
                changed[at:at] = changed[begin : begin + random.randint(1, 100)]
            case 8:
                changed[at:at] = random.choice([b"\x00", b"\xff\xfe", b"]" * 5, b"[" * 5000, b'"', b"\n", b"'''"])
            case _ if random.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def wrong_lines(text: str, more: tuple[str, ...], random: Random) -> bytes:
    """Lines of the form "name: value" with one of them changed, cut, taken out, or another one brought in."""
    lines = text.split("\n")
    for _ in range(random.choice([1, 2, 4])):
        at = random.randrange(len(lines)) if lines else 0
        match random.randrange(5):
            case 0:
                lines.insert(at, random.choice(more))
            case 1 if lines:
                lines.pop(at)
            case 2 if lines:
                lines[at] = lines[at][: random.randrange(len(lines[at]) + 1)] + random.choice(TEXTS)
            case 3 if lines:
                lines.insert(at, random.choice(lines))
            case _ if lines:
                lines[at] = f"{lines[at].split(':')[0]}: {random.choice(TEXTS)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@functools.cache
def patterns() -> tuple[Any, ...]:
    """Every pattern by which a line of a log is recognised, parsed."""
    texts = [signature.pattern for rule in RULES.values() for signature in rule.signatures]
    return tuple(regex_parser.parse(text) for text in texts)


def text_of(pattern: Any, random: Random, depth: int = 0) -> str:
    """A text that a pattern matches, or nearly: assertions are passed over."""
    made = []
    for operator, argument in pattern:
        name = str(operator)
        if name == "LITERAL":
            made.append(chr(argument))
        elif name in {"ANY", "NOT_LITERAL"}:
            made.append(random.choice("ax 1:/\"'[]{}"))
        elif name == "IN":
            made.append(_one_of(argument, random))
        elif name == "BRANCH":
            made.append(text_of(random.choice(argument[1]), random, depth + 1))
        elif name in {"SUBPATTERN", "ATOMIC_GROUP"}:
            made.append(text_of(argument[3] if name == "SUBPATTERN" else argument, random, depth + 1))
        elif name.endswith("_REPEAT"):
            least, most, inner = argument
            most = min(int(most), least + random.choice([0, 1, 3, 3, 30 if depth < 1 else 3]))
            made += [text_of(inner, random, depth + 1) for _ in range(random.randint(least, max(least, most)))]
        elif name == "GROUPREF":
            made.append("x")
    return "".join(made)


def _one_of(parts: list[Any], random: Random) -> str:
    if str(parts[0][0]) == "NEGATE":
        return random.choice("aZ0_")
    name, argument = random.choice(parts)
    if str(name) == "LITERAL":
        return chr(argument)
    if str(name) == "RANGE":
        return chr(random.randint(argument[0], min(argument[1], argument[0] + 500)))
    kind = str(argument)
    if "NOT" in kind:
        return random.choice("abcXYZ019_")
    return random.choice("0123456789" if "DIGIT" in kind else " " if kind.endswith("SPACE") else "abcXYZ019_")


NUMBER = re.compile(r"\d+")
ODD_NUMBERS = ("0", "-1", "9" * 30, "9" * 5000, "٣٤", "²", "1e999", "nan", "0x", "1.2.3.4", "1,000,000", "1_000", "")
PREFIXES = (
    *("[rank0]: ", "[rank1]:", "0: ", "[1,3]<stderr>:", "2026-11-23T10:00:00.123Z ", "worker-0: ", "[default3]:"),
    *("\x1b[36m(Worker pid=1)\x1b[0m ", "node1: [rank7]: ", "(Actor pid=12, ip=10.0.0.1) "),
)
FRAME_LINES = (
    *("Traceback (most recent call last):", '  File "/x/t.py", line 3, in f', "    a()", "    ^^^", "RuntimeError: x"),
    *("During handling of the above exception, another exception occurred:", "100%|███| 3/3 [00:01<00:00]", "Killed"),
    *("{'loss': 1.5, 'epoch': 0.1}", '{"loss": NaN, "step": 9}', "ninja: build stopped: subcommand failed."),
    *("FAILED: a.o", "[1/3] c++ -x", "Segmentation fault (core dumped)", "Signal 9 (SIGKILL) received by PID 1"),
    *("[2026-11-23 10:00:00,123] [INFO] [launch.py:1:main] Killing subprocess 3", "exits with return code = -9"),
)


def log_line(random: Random) -> str:
    """A line that a rule may know, one of a traceback or a launcher, or any of these changed."""
    kind = random.random()
    if kind < 0.55:
        line = text_of(random.choice(patterns()), random)
    elif kind < 0.7:
        line = random.choice(random.choice(random.choice(list(RULES.values())).signatures).sample.split("\n"))
    else:
        line = random.choice(FRAME_LINES)
    match random.randrange(14):
        case 0 | 1:
            return NUMBER.sub(lambda found: random.choice(ODD_NUMBERS) if random.random() < 0.5 else found[0], line)
        case 2:
            return line[: random.randrange(len(line) + 1)]
        case 3:
            return line + random.choice(TEXTS) + line[::-1][:50]
        case 4 | 5:
            return random.choice(PREFIXES) + line
    return line
