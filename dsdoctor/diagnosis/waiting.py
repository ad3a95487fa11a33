"""What the ranks say that waited in vain -> which rank did not come."""

import re
from dataclasses import replace

from dsdoctor.core.finding import Finding
from dsdoctor.diagnosis.collectives import rank_behind, rank_that_fell_silent
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.stages import activity
from dsdoctor.diagnosis.timeline import Timeline
from dsdoctor.diagnosis.zero_losses import loss_of_zero

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

SAME_MODULES = (
    "under ZeRO-3 every module's forward and backward is a collective, so all ranks must run the same modules. With a mixture "
    "of experts mark its block as a leaf module: deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock]) before "
    "deepspeed.initialize, or use ZeRO-2. Without one, look for samples without image or audio (run their tower on a dummy), a "
    "branch on the data, a rank with fewer batches, generate without synced_gpus=True. If a rank's own log ends in an error, "
    "that comes first; one that is only slow needs a longer timeout: deepspeed.init_distributed(timeout=...)"
)


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
    title = finding.title.removesuffix(": it ended first, and its own log says how") if waited else finding.title
    fix = finding.fix
    if fix and "took different paths" in waited and SAVING in waited:
        fix = replace(fix, text="call save_checkpoint on every rank, not on rank 0 alone: it is a collective")
    elif fix and not hit.signature.title and _of_zero3(hit, timeline, facts):
        fix = replace(fix, text=SAME_MODULES)
        title = f"{title}, under ZeRO-3" + (f" with a mixture of experts ({facts.experts})" if facts.experts else "")
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
    title = f"{finding.title}: under ZeRO-3, where modules gather, the ranks did not run the same modules"
    if facts.experts:
        title += (
            f"; the model is a mixture of experts ({facts.experts}), in which each rank runs those of its own tokens"
        )
    return replace(finding, title=title, fix=replace(finding.fix, text=SAME_MODULES))


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
