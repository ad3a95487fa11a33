"""An incident -> files in the run's folder, one a rank, and the verdict; and back."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import PRIVATE, make_folder, read_limited, write_bytes
from dsdoctor.core.text import decode, encode
from dsdoctor.hang.models import Incident, RankView

SCHEMA = "dsdoctor/1"
INCIDENT = "incident.json"
MOST_FILES = 100_000


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """What is written of one rank; ``view`` and what of the incident is known on its node."""

    schema: str = SCHEMA
    kind: str = "hang-rank"
    run: str = ""
    when: float = 0.0
    still: float = 0.0
    after: float = 0.0
    world: int = 0
    silent_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nccl: tuple[str, ...] = ()
    view: RankView


def write_ranks(folder: Path, incident: Incident) -> None:
    """Write a file for each rank of an incident. Raises OSError."""
    make_folder(folder, mode=0o755)
    for view in incident.ranks:
        rank_file = RankFile(
            run=incident.run,
            when=incident.when,
            still=incident.still,
            after=incident.after,
            world=incident.world,
            silent_hosts=incident.silent_hosts,
            left_hosts=incident.left_hosts,
            nccl=incident.nccl,
            view=view,
        )
        write_bytes(folder / f"rank-{view.rank:05d}.json", encode(rank_file), mode=PRIVATE)


def read_ranks(folder: Path) -> Incident:
    """The newest incident whose files lie in a folder. Raises UsageError where there is none."""
    found: list[RankFile] = []
    for path in sorted(folder.glob("rank-*.json"))[:MOST_FILES]:
        with contextlib.suppress(msgspec.DecodeError):
            read = decode(_content(path), RankFile)
            found += [read] if read.kind == "hang-rank" else []
    if not found:
        raise UsageError(
            f"{folder} holds no files of a hang watch", hint="name the folder that dsdoctor.run named: dsdoctor-hang"
        )
    newest = max(found, key=lambda each: each.when)
    same = [each for each in found if each.run == newest.run]
    return Incident(
        world=newest.world,
        still=max(each.still for each in same),
        after=newest.after,
        ranks=tuple(each.view for each in sorted(same, key=lambda each: each.view.rank)),
        silent_hosts={host: ranks for each in same for host, ranks in each.silent_hosts.items()},
        left_hosts={host: ranks for each in same for host, ranks in each.left_hosts.items()},
        nccl=next((each.nccl for each in same if each.nccl), ()),
        when=newest.when,
        run=newest.run,
    )


def _content(path: Path) -> bytes:
    try:
        return read_limited(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint="see whose it is: ls -l") from error
