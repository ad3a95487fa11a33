"""hang: a folder of a hanging run, or processes that run now -> what was seen of its ranks, and the verdict. Prints nothing."""

from collections.abc import Iterable
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import Host
from dsdoctor.hang.incidents import APART, dumps_in, look_at, read_dumps, read_ranks
from dsdoctor.hang.models import Incident, Verdict
from dsdoctor.hang.processes import rank_processes
from dsdoctor.hang.verdict import judge


def judge_folder(folder: Path) -> tuple[Incident, Verdict]:
    """Judge what a folder holds. Raises UsageError for one that holds nothing of a hang."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint="name the one that dsdoctor.run named: dsdoctor hang DIR")
    dumps = dumps_in(folder)
    incident = read_dumps(dumps) if dumps and not any(folder.glob("rank-*.json")) else read_ranks(folder)
    return incident, judge(incident)


def judge_processes(pids: Iterable[int], host: Host, *, apart: float = APART) -> tuple[Incident, Verdict]:
    """Judge the ranks among some processes and below them. Raises UsageError for processes that are not there."""
    incident = look_at(rank_processes(pids), host, apart=apart)
    return incident, judge(incident)
