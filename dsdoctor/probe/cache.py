"""Host + dsdoctor's cache folder -> a Gap where nothing in it is used, because others may write there."""

import glob
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap

FOLDERS = ("toolkits", "sdists", "builds", "targets", "logs")
"""What lies in the cache besides compiled ops, which a group may share and which have a rule of their own."""
MARKS = "toolkits/[!.]*/home/dsdoctor-toolkit.txt"
"""The file that a finished toolkit has."""
RUN = ("home/bin/nvcc", "home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64")
"""What of a toolkit runs, or is compiled and linked into ops."""


def judge_cache(host: Host, cache: str) -> Gap | None:
    """Why the cache, or one of its folders, is not used; None where all of it is, or there is none yet."""
    reasons = (
        host.distrust(cache),
        *(host.distrust(f"{cache}/{name}", "*") for name in FOLDERS),
        *_toolkits(host, cache),
    )
    return next((Gap(question="cache", reason=reason) for reason in reasons if reason), None)


def distrust_toolkit(host: Host, cache: str, name: str) -> str | None:
    """Why the nvcc of an assembled toolkit is not run: others may write to it, or on the way to it."""
    reasons = (host.distrust(f"{cache}/toolkits", f"{glob.escape(name)}/{part}") for part in RUN)
    return next((reason for reason in reasons if reason), None)


def _toolkits(host: Host, cache: str) -> Iterator[str | None]:
    for mark in host.glob(f"{glob.escape(cache)}/{MARKS}"):
        yield distrust_toolkit(host, cache, mark.split("/")[-3])
