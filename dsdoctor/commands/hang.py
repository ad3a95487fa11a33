"""hang: a folder of a hanging run -> what was seen of its ranks, and the verdict. Prints nothing."""

from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.hang.incident_files import read_ranks
from dsdoctor.hang.models import Incident, Verdict
from dsdoctor.hang.recorder_dumps import dumps_in, read_dumps
from dsdoctor.hang.verdict import judge


def judge_folder(folder: Path) -> tuple[Incident, Verdict]:
    """Judge what a folder holds. Raises UsageError for one that holds nothing of a hang."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint="name the one that dsdoctor.run named: dsdoctor hang DIR")
    dumps = dumps_in(folder)
    incident = read_dumps(dumps) if dumps and not any(folder.glob("rank-*.json")) else read_ranks(folder)
    return incident, judge(incident)
