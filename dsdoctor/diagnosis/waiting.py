"""What the ranks say that waited in vain -> which rank did not come."""

import re
from collections.abc import Iterable
from dataclasses import replace

from dsdoctor.core.finding import Finding
from dsdoctor.diagnosis.lines import last_segment, segments
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.timeline import Timeline, activity, speaker_of
from dsdoctor.rules import book

# What NCCL's watchdogs and the ranks' own last lines say -> which rank did not come to a collective, or who took another one.
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

NUMBERED_RANK = re.compile(
    r"\b(?:rank|device|gpu|worker|process|cuda)(?:[ _]?id)?[ :=#\[(]{0,2}(\d{1,4})\b", re.IGNORECASE
)

MAX_COMPARED = 256  # how many lines before the first watchdog are compared


def rank_behind(texts: Iterable[str]) -> str:
    """Which rank is behind, as the watchdogs' lines say; "" where they do not.

    >>> rank_behind([
    ...     "[PG ID 0 PG GUID 0 Rank 0] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6",
    ...     "[PG ID 0 PG GUID 0 Rank 1] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6",
    ...     "[PG ID 0 PG GUID 0 Rank 2] Timeout at NCCL work: 7, last enqueued NCCL work: 6, last completed NCCL work: 6"])
    'rank 2 is behind: it last started work 6, the others 9'
    """
    lines = list(texts)
    return _reported(lines) or _different_operations(lines) or _fewest_works(lines)


def _reported(lines: list[str]) -> str:
    """What torch's own report of the desync says."""
    for text in lines:
        if found := LAGGING.search(text):
            return f"torch names {_ranks_named(found['ranks'])} as lagging: it never joined a collective"
        if found := BEHIND.search(text):
            return f"{_ranks_named(found['ranks'])} finished collective {found['number']} and did not join the next one"
        if found := MISSING.search(text):
            return f"{_ranks_named(found['ranks'])} did not join the collective"
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
            names = _ranks_named(", ".join(map(str, behind[:6])))
            verb = "are" if len(behind) > 1 else "is"
            it = "they" if len(behind) > 1 else "it"
            return f"{names} {verb} behind: {it} last started work {fewest}, the others {most}"
    return ""


def rank_that_fell_silent(raws: list[bytes]) -> str:
    """The rank that did not print a line that all others printed, and that it had printed in an earlier round; "" where none.

    >>> rank_that_fell_silent([b"forward on rank 0 step 1", b"forward on rank 1 step 1", b"forward on rank 1 step 2"])
    'rank 0 never printed its next "forward on rank # step 2", the others did'
    """
    rounds: dict[str, dict[str, set[int]]] = {}
    for raw in raws[-MAX_COMPARED:]:
        text = (segments(raw) or [""])[-1][:200]
        found, number = NUMBERED_RANK.search(text), speaker_of(raw).rank
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
    return f'{_ranks_named(", ".join(map(str, missing[:6])))} never printed its next "{texts[-1][:80]}", the others did'


def _ranks_named(numbers: str) -> str:
    return f"ranks {numbers}" if "," in numbers else f"rank {numbers.strip()}"


CLIENTS = re.compile(r"(\d{1,6})/(\d{1,6}) (?:clients|workers) joined")

STORE = re.compile(r"world_size=(\d{1,6}), (?:worker_count|num_workers_joined)=(\d{1,6})")

BARRIER = re.compile(
    r"[Rr]anks? (\d{1,6}(?:, ?\d{1,6}){0,40}) failed to pass monitoredBarrier|check rank (\d{1,6}) logs for faulty rank"
)

SAVING = "while a checkpoint was saved"

KEYS = re.compile(r"wait timeout after \d{1,12}ms, keys: (\S{1,200})")

ZERO3_COLLECTIVES = re.compile(r"ALLGATHER|ALL_?GATHER|REDUCE_SCATTER|all_gather|reduce_scatter|fetch_sub_module")
"""What ranks call in each forward and backward under ZeRO-3."""

TRAINED = re.compile(rb"['\"]loss['\"]|\bloss[=:]|Running training|Invalidate trace cache")
"""That a training has begun, where no line numbers its steps."""


def with_who_waited(finding: Finding, hit: Hit, timeline: Timeline, facts: Facts) -> Finding:
    """A finding of ranks that waited, with the rank that did not come in its title."""
    said = waited_for(timeline)
    waited = said or rank_behind(timeline.collectives) or _ended_well(timeline) or _different_places(timeline)
    waited = waited or rank_that_fell_silent(timeline.before_waiting) or _absent(timeline)
    if said and hit.signature.title:
        waited = ""  # why: a rule that has a title of its own for this line says it already
    numbers = sorted(_waiting(timeline) | {speaker.number for speaker in hit.speakers if speaker.number is not None})
    who = f"waiting: rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:16]))}" if numbers else ""
    zero = loss_of_zero(timeline.before_waiting)
    evidence = (*finding.evidence, *(text for text in (said, who, zero) if text and text != waited))
    title = hit.signature.brief if waited and hit.signature.brief else finding.title
    fix = finding.fix
    if fix and "took different paths" in waited and SAVING in waited:
        fix = replace(fix, text=book.phrase("diagnosis", "save-on-every-rank"))
    elif fix and not hit.signature.title and _of_zero3(hit, timeline, facts):
        fix = replace(fix, text=book.phrase("diagnosis", "same-modules"))
        if facts.experts:
            title = book.phrase("diagnosis", "under-zero3-experts", title=title, experts=facts.experts)
        else:
            title = book.phrase("diagnosis", "under-zero3", title=title)
    return replace(finding, title=f"{title} ({waited})" if waited else title, evidence=evidence, fix=fix)


def _of_zero3(hit: Hit, timeline: Timeline, facts: Facts) -> bool:
    """Whether the training had begun, under ZeRO-3, and ranks waited in what only modules call."""
    if facts.zero_stage != "3" or not any(map(ZERO3_COLLECTIVES.search, [hit.text, *timeline.collectives])):
        return False
    return timeline.step is not None or any(map(TRAINED.search, timeline.before_waiting))


def with_modules(finding: Finding, hit: Hit, facts: Facts) -> Finding:
    """A finding of ranks that call different collectives: under ZeRO-3 modules call them, not the script."""
    if not finding.fix or facts.zero_stage != "3" or not ZERO3_COLLECTIVES.search(hit.text):
        return finding
    if facts.experts:
        title = book.phrase("diagnosis", "other-modules-experts", title=finding.title, experts=facts.experts)
    else:
        title = book.phrase("diagnosis", "other-modules", title=finding.title)
    return replace(finding, title=title, fix=replace(finding.fix, text=book.phrase("diagnosis", "same-modules")))


def waited_for(timeline: Timeline) -> str:
    """Which ranks did not come, as the ones that waited say; "" where they do not.

    >>> waited_for(Timeline(waited=["Timed out after 61 seconds waiting for clients. 2/3 clients joined."]))
    '2 of 3 processes came; 1 never did: see the log of the node or rank that is missing'
    """
    for text in timeline.waited:
        if found := CLIENTS.search(text):
            came, world = int(found[1]), int(found[2])
            return f"{came} of {world} processes came; {world - came} never did: see the log of the node or rank that is missing"
        if found := STORE.search(text):
            world, came = int(found[1]), int(found[2])
            return f"{came} of {world} ranks came to the barrier of the store"
        if found := BARRIER.search(text):
            return f"it waited for rank {found[1] or found[2]}, which did not come"
        if found := KEYS.search(text):
            return f"no rank set the key {found[1]} in the store"
    return ""


def _ended_well(timeline: Timeline) -> str:
    """That the rank that is gone did not fail, where the launcher knows of one failure only."""
    if not any("<NO_OTHER_FAILURES>" in text for text in timeline.waited) or len(_lost(timeline)) != 1:
        return ""
    return (
        "no other rank failed: another one had ended before with status 0, after fewer batches of data, by sys.exit() "
        "or on another path"
    )


def _waiting(timeline: Timeline) -> set[int]:
    """The ranks that say that they waited."""
    speakers = [*timeline.watchdogs, *(one.speaker for one in timeline.failures if one.follows)]
    return {speaker.number for speaker in speakers if speaker.number is not None}


def _absent(timeline: Timeline) -> str:
    """The rank that is known and did not wait with the others, where it is one."""
    waiting, known = _waiting(timeline), timeline.ranks
    absent = sorted(known - waiting)
    if not waiting or len(absent) != 1 or len(known) < 2:
        return ""
    return f"rank {absent[0]} did not wait with the others: it came late, hangs, took another path or had ended"


def _lost(timeline: Timeline) -> set[int | None]:
    """The ranks that say that another one is gone."""
    return {one.speaker.number for one in timeline.failures if one.follows}


def _different_places(timeline: Timeline) -> str:
    """Where the ranks stood that waited for each other, if not all at the same place."""
    places: dict[int, tuple[str, str]] = {}
    for one in timeline.failures:
        if one.follows and one.frame and one.speaker.number is not None:
            places.setdefault(one.speaker.number, (str(one.frame), activity(one.frames, None)))
    if len(places) < len(timeline.ranks) or len({doing for _, doing in places.values()}) < 2:
        return _in_another_collective(timeline)
    told = [f"rank {number} {doing or 'elsewhere'} at {place}" for number, (place, doing) in sorted(places.items())[:3]]
    return f"the ranks took different paths: {', '.join(told)}"


def _in_another_collective(timeline: Timeline) -> str:
    """Every known rank waited until its own timeout: none is missing."""
    timeouts = {one.speaker.number for one in timeline.failures if "Timed out waiting" in one.text} - {None}
    if len(timeouts) < 2 or not timeline.ranks <= timeouts:
        return ""
    return "every rank waited and none is missing: they stand in different collectives, or the network between them is broken"


# The last lines before the ranks waited -> that the loss had fallen to exactly 0.0: the training was broken before it hung.
PRINTED_LOSS = re.compile(
    rb"['\"]?\b(?:lm[_ ])?loss['\"]?\s{0,3}[:=]\s{0,3}['\"]?(\d{1,9}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?)(?![\d.])"
)

OF_A_REWARD = re.compile(rb"reward|\bkl\b|advantage|completion_length|completions/|clip_ratio")
"""Words of lines of reinforcement learning, where a loss of 0 is nothing strange."""

PLAUSIBLE = 1.0  # a loss from which a training seldom falls to what is printed as zero within a log line


def loss_of_zero(raws: list[bytes]) -> str:
    """What is told of a loss that was a plausible one, and then exactly zero up to the last line that has one; "" otherwise.

    >>> loss_of_zero([b"{'loss': 3.5534, 'epoch': 0.01}", b"{'loss': 0.0, 'epoch': 0.01}"])
    "the loss was printed as 0.0 before, and 3.5534 before that: learning may have broken down (labels that are all \
masked, a kernel or weights that give nan); that may be the cause of both: {'loss': 0.0, 'epoch': 0.01}"
    >>> loss_of_zero([b"{'loss': 3.5534}", b"{'loss': 0.0}", b"{'loss': 2.1}"])
    ''
    """
    told = [
        (found[1], raw) for raw in raws if (found := PRINTED_LOSS.search(raw[-600:])) and not OF_A_REWARD.search(raw)
    ]
    if not told or float(told[-1][0]) != 0:
        return ""
    before = next((value for value, _ in reversed(told) if float(value) != 0), None)
    if before is None or float(before) < PLAUSIBLE:
        return ""
    return (
        f"the loss was printed as {told[-1][0].decode()} before, and {before.decode()} before that: learning may have broken down "
        "(labels that are all masked, a kernel or weights that give nan); that may be the cause of both: "
        f"{last_segment(told[-1][1])[:160]}"
    )
