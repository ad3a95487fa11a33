"""Host + dsdoctor's cache folder -> a Gap where nothing in it is used, because others may write there."""

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap

FOLDERS = ("toolkits", "sdists", "builds", "targets", "logs")
"""What lies in the cache besides compiled ops, which a group may share and which have a rule of their own."""


def judge_cache(host: Host, cache: str) -> Gap | None:
    """Why the cache, or one of its folders, is not used; None where all of it is, or there is none yet."""
    reasons = (host.distrust(path) for path in (cache, *(f"{cache}/{name}" for name in FOLDERS)))
    return next((Gap(question="cache", reason=reason) for reason in reasons if reason), None)
