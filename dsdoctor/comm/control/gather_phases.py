"""The phases in which rank 0 waits and compares: who comes, what their surroundings are, whether all are alike."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsdoctor.comm.control.messages import News
from dsdoctor.comm.control.phases import Page
from dsdoctor.comm.control.test_run import Course
from dsdoctor.comm.launch.start import gone_file
from dsdoctor.comm.local import fingerprint
from dsdoctor.comm.local.checks import examine_all
from dsdoctor.comm.models import Claim
from dsdoctor.comm.rendezvous import checks as arrival_checks
from dsdoctor.comm.rendezvous.board import Log
from dsdoctor.comm.rendezvous.checks import Arrivals
from dsdoctor.comm.words import named

ARRIVAL, LONGEST_ARRIVAL = 0.6, 90.0
"""Ranks have this part of the deadline to come, and at most so many seconds."""
TWINS = 0.15
"""Seconds for a second claim of a rank that is here already: duplicates are started together."""
SHOWN = ("torch", "cuda", "nccl", "deepspeed", "python")


def rendezvous(course: Course, page: Page) -> None:
    """Wait for the claims of all; its time is that since the start."""
    page.began = course.began
    log, claims = course.member.board.log("claims"), list[Claim]()
    until = min(course.end, course.began + min(course.settings.deadline * ARRIVAL, LONGEST_ARRIVAL))
    while not _settled(claims, course.me.world) and time.monotonic() < until:
        if len(claims) + len(_last_words(course, claims)) >= course.me.world:
            break
        came = len(claims)
        claims += _seen(log)
        if len(claims) != came:
            course.claims = tuple(claims)
            course.member.say(News(at=_said(claims, course.me.world, course.me.hosts)))
        time.sleep(course.member.pace)
    time.sleep(TWINS)
    course.claims = (*claims, *_seen(log))
    arrivals = Arrivals(
        me=course.me,
        claims=course.claims,
        waited=time.monotonic() - course.began,
        last_words=_last_words(course, course.claims),
    )
    page.findings = tuple(finding for check in arrival_checks.CHECKS for finding in check(arrivals))
    times = [claim.seen for claim in course.claims]
    page.said = f"{_said(course.claims, course.me.world, course.me.hosts)}, {max(times) - min(times):.1f} s apart"


def local(course: Course, page: Page) -> None:
    """Judge what every rank told of its surroundings."""
    page.findings = examine_all(course.claims)
    interfaces = list(dict.fromkeys(claim.interface for claim in course.claims))
    page.said = f"{course.member.backend} over {', '.join(interfaces[:4])}"


def same(course: Course, page: Page) -> None:
    """Compare what should be alike."""
    page.findings = fingerprint.examine(course.claims)
    mine = course.member.claim.fingerprint
    page.said = ", ".join(f"{name} {mine[name]}" for name in SHOWN if name in mine)


def all_there(course: Course) -> bool:
    """Whether every rank of this world came once, and counts as rank 0 does."""
    ranks = [claim.rank for claim in course.claims if claim.world == course.me.world]
    return sorted(ranks) == list(range(course.me.world)) and len(course.claims) == len(ranks)


def _seen(log: Log) -> list[Claim]:
    """New claims, with the time at which rank 0 saw them: the clocks of other hosts may be wrong."""
    return [replace(claim, seen=time.time()) for claim in log.news(Claim)]


def _settled(claims: Sequence[Claim], world: int) -> bool:
    """Whether nobody more is due; one claim too many, or of another world, will not become right by waiting."""
    if any(claim.world != world for claim in claims) or len({claim.rank for claim in claims}) < len(claims):
        return True
    return len(claims) >= world


def _said(claims: Sequence[Claim], world: int, hosts: tuple[str, ...]) -> str:
    here, places = {claim.rank for claim in claims}, len({claim.host for claim in claims})
    missing = tuple(rank for rank in range(world) if rank not in here)
    absent = f", {named(missing, hosts)} not" if missing else ""
    return f"{world - len(missing)} of {world} ranks are here, on {places} host{'s' * (places != 1)}{absent}"


def _last_words(course: Course, claims: Sequence[Claim]) -> dict[int, str]:
    """What is written, in a folder that rank 0 can read, of ranks that ended before they came."""
    here = {claim.rank for claim in claims}
    found: dict[int, str] = {}
    for rank in range(course.me.world) if course.settings.out and course.me.launcher == "dsdoctor" else ():
        path = gone_file(Path(course.settings.out or "."), course.me.run, rank)
        if rank not in here and path.is_file():
            found[rank] = path.read_text(errors="replace").strip()
    return found
