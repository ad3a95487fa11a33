"""What NCCL's watchdogs and the ranks' own last lines say -> which rank did not come to a collective, or who took another one."""

import re
from collections.abc import Iterable

from dsdoctor.diagnosis.clean import segments
from dsdoctor.diagnosis.speakers import speaker_of

WORK = re.compile(
    r"(?:PG (?:ID )?(?P<group>\d{1,6})\b.{0,60}?)?\bRank (?P<rank>\d{1,6})\].{0,300}?[Ll]ast enqueued (?:NCCL )?work: "
    r"(?P<enqueued>-?\d{1,15}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,15})"
)
TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d{1,15}), "
    r"OpType=(?P<operation>\w{1,40}), NumelIn=(?P<size>\d{1,18})"
)
LAGGING = re.compile(r"ranks \[(?P<ranks>\d[\d, ]{0,200})\] are the lagging ranks")
BEHIND = re.compile(
    r"\[(?P<ranks>\d[\d, ]{0,200})\] finished collective #(?P<number>\d{1,12}), but didn't join collective"
)
MISSING = re.compile(r"[Mm]issing [Rr]anks?:? ?[\[{](?P<ranks>\d[\d, ]{0,200})[\]}]")

NUMBERED = re.compile(r"\b(?:rank|device|gpu|worker|process|cuda)(?:[ _]?id)?[ :=#\[(]{0,2}(\d{1,4})\b", re.IGNORECASE)
LOOKED_AT = 256
"""How many lines before the first watchdog are compared."""


def rank_behind(texts: Iterable[str]) -> str:
    """Which rank is behind, as the watchdogs' lines say; "" where they do not.

    >>> rank_behind([
    ...     "[PG ID 0 PG GUID 0 Rank 0] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6",
    ...     "[PG ID 0 PG GUID 0 Rank 1] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6",
    ...     "[PG ID 0 PG GUID 0 Rank 2] Timeout at NCCL work: 7, last enqueued NCCL work: 6, last completed NCCL work: 6"])
    'rank 2 is behind: work 6 was the last one that it had begun, the others had begun 9'
    """
    lines = list(texts)
    return _reported(lines) or _different_operations(lines) or _fewest_works(lines)


def _reported(lines: list[str]) -> str:
    """What torch's own report of the desync says."""
    for text in lines:
        if found := LAGGING.search(text):
            return f"torch names {_ranks(found['ranks'])} as lagging: it never joined a collective"
        if found := BEHIND.search(text):
            return f"{_ranks(found['ranks'])} finished collective {found['number']} and did not join the next one"
        if found := MISSING.search(text):
            return f"{_ranks(found['ranks'])} did not join the collective"
    return ""


def _different_operations(lines: list[str]) -> str:
    """Ranks that waited at the same number in different collectives."""
    by_number: dict[str, dict[str, list[str]]] = {}
    timeouts = [found for found in map(TIMEOUT.search, lines) if found]
    several = {found["operation"] for found in timeouts}
    for found in timeouts:
        # why: gathers and reductions of one kind may differ in size only, a reduction to one rank has two sizes anyway
        place = found["operation"] if len(several) > 1 else f"{found['operation']} of {found['size']} elements"
        ranks = by_number.setdefault(found["number"], {}).setdefault(place, [])
        if found["rank"] not in ranks:
            ranks.append(found["rank"])
    for number, operations in by_number.items():
        if len(operations) > 1:
            told = ", ".join(
                f"rank {', '.join(ranks[:4])} in {operation}" for operation, ranks in sorted(operations.items())
            )
            return f"the ranks took different paths: at work {number} {told}"
    return ""


def _fewest_works(lines: list[str]) -> str:
    """The rank that had begun fewer works than the others of its group."""
    groups: dict[str, dict[int, int]] = {}
    for found in filter(None, map(WORK.search, lines)):
        groups.setdefault(found["group"] or "", {})[int(found["rank"])] = int(found["enqueued"])
    for begun in groups.values():
        most = max(begun.values())
        behind = sorted(rank for rank, number in begun.items() if number < most)
        if behind and len(behind) * 2 < len(begun):
            fewest = min(begun.values())
            names = _ranks(", ".join(map(str, behind[:6])))
            verb = "are" if len(behind) > 1 else "is"
            it = "they" if len(behind) > 1 else "it"
            return f"{names} {verb} behind: work {fewest} was the last one that {it} had begun, the others had begun {most}"
    return ""


def rank_that_fell_silent(raws: list[bytes]) -> str:
    """The rank that did not print a line that all others printed, and that it had printed in an earlier round; "" where none.

    >>> rank_that_fell_silent([b"forward on rank 0 step 1", b"forward on rank 1 step 1", b"forward on rank 1 step 2"])
    'rank 0 never printed its next "forward on rank # step 2", the others did'
    """
    rounds: dict[str, dict[str, set[int]]] = {}
    for raw in raws[-LOOKED_AT:]:
        text = (segments(raw) or [""])[-1][:200]
        found, number = NUMBERED.search(text), speaker_of(raw).rank
        if found:
            number, text = int(found[1]), f"{text[: found.start(1)]}#{text[found.end(1) :]}"
        if number is not None and text:
            shape = re.sub(r"\d+(?:\.\d+)?", "#", text)
            rounds.setdefault(shape, {}).setdefault(text, set()).add(number)
    for shape in reversed(rounds):
        told = _not_in_the_last_round(rounds[shape])
        if told:
            return told
    return ""


def _not_in_the_last_round(rounds: dict[str, set[int]]) -> str:
    """Who is missing in the last round of a line, where the round before had everybody."""
    texts = list(rounds)
    if len(texts) < 2:
        return ""
    everybody: set[int] = set().union(*rounds.values())
    missing = sorted(everybody - rounds[texts[-1]])
    if not missing or len(everybody) < 2 or rounds[texts[-2]] != everybody or len(missing) * 2 > len(everybody):
        return ""
    return f'{_ranks(", ".join(map(str, missing[:6])))} never printed its next "{texts[-1][:80]}", the others did'


def _ranks(numbers: str) -> str:
    return f"ranks {numbers}" if "," in numbers else f"rank {numbers.strip()}"
