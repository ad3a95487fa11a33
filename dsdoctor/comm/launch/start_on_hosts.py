"""Starts the ranks of a hostfile, one ssh a host, and waits for rank 0's report. Acts; judges nothing."""

import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from dsdoctor.comm.launch.commands import SSH, HostOrder, remote_command
from dsdoctor.comm.launch.evidence_files import LARGEST, MOST_FILES
from dsdoctor.comm.launch.on_host import HostTold
from dsdoctor.comm.launch.start import AFTER, Absences, RankEnded, RankTold
from dsdoctor.hosts.fan_out import HostCommand, on_hosts

ON_HOST = "dsdoctor.comm.launch.on_host"


def start_on_hosts(
    orders: Mapping[str, HostOrder],
    *,
    python: str,
    folder: str,
    variables: Mapping[str, str],
    seconds: float,
    ssh: Sequence[str] = ("ssh", *SSH),
) -> RankTold:
    """Run the ranks of each host in ``folder`` with ``variables``. Whatever happens, no ssh is left, and what runs on a host ends
    when its connection does."""
    commands = [
        HostCommand(
            host=host,
            command=remote_command((python, "-m", ON_HOST, msgspec.json.encode(order).decode()), folder, variables),
        )
        for host, order in orders.items()
    ]
    heard = _Heard(orders)
    on_hosts(commands, heard, ssh=ssh, seconds=seconds, until=heard.over)
    ended = tuple(heard.told[rank] for rank in sorted(heard.told))
    return RankTold(document=heard.document, ended=ended, files=heard.files)


class _Heard:
    """What the hosts said: rank 0's document, and which ranks ended."""

    def __init__(self, orders: Mapping[str, HostOrder]) -> None:
        self._orders = orders
        self._last_words: dict[str, str] = {}
        self._absences = Absences(next(iter(orders.values())))
        self._since: float | None = None
        self.document = ""
        self.files: dict[str, str] = {}
        self.told: dict[int, RankEnded] = {}

    def line(self, host: str, text: str, *, error: bool) -> None:
        """A line of a host: an answer of ours, or words; those of rank 0's host are shown."""
        told = None if error else _answer(text)
        if told is None:
            self._last_words[host] = text.strip() or self._last_words.get(host, "")
            if self._orders[host].first == 0:
                print(text, file=sys.stderr, flush=True)
        elif told.ended is not None:
            self._note(host, told.ended)
        elif self._orders[host].first == 0 and told.name and len(self.files) < MOST_FILES:
            self.files[told.name] = told.text[-LARGEST:]
        elif self._orders[host].first == 0 and told.document is not None:
            self.document = told.document

    def ended(self, host: str, status: int) -> None:
        """All ranks of a host that said nothing of their end ended with its command; rank 0 is told, for they cannot."""
        order = self._orders[host]
        how = f"the command on {host} ended with status {status}"
        last = self._last_words.get(host, "")[:300]
        for rank in range(order.first, order.first + order.count):
            if rank not in self.told:
                self.told[rank] = RankEnded(rank=rank, host=host, how=how, last_line=last)
                self._absences.add(self.told[rank], host)
        self._rank_0_ended()

    def over(self) -> bool:
        """Whether rank 0 has ended, and the others had their time to follow. Called again and again."""
        if self._since is None:
            self._absences.send()
        return self._since is not None and time.monotonic() > self._since + AFTER

    def _note(self, host: str, ended: RankEnded) -> None:
        order = self._orders[host]
        if order.first <= ended.rank < order.first + order.count:
            self.told[ended.rank] = ended
        self._rank_0_ended()

    def _rank_0_ended(self) -> None:
        if 0 in self.told and self._since is None:
            self._since = time.monotonic()


def _answer(text: str) -> HostTold | None:
    """A line as ``on_host`` writes it; None for anything else, such as what a login script prints."""
    try:
        return msgspec.json.decode(text, type=HostTold)
    except msgspec.MsgspecError:
        return None
