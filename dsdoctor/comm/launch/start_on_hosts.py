"""Starts the ranks of a hostfile, one ssh a host, and waits for rank 0's report. Acts; judges nothing."""

import sys
from collections.abc import Mapping, Sequence

import msgspec

from dsdoctor.comm.launch.commands import SSH, HostOrder, remote_command
from dsdoctor.comm.launch.evidence_files import LARGEST, MOST_FILES
from dsdoctor.comm.launch.on_host import HostTold
from dsdoctor.comm.launch.start import Endings, RankEnded, RankTold
from dsdoctor.hosts.ssh import HostCommand, on_hosts

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
    on_hosts(commands, heard, ssh=ssh, seconds=seconds, until=heard.endings.over)
    told = heard.endings.told
    return RankTold(document=heard.document, ended=tuple(told[rank] for rank in sorted(told)), files=heard.files)


class _Heard:
    """What the hosts said: rank 0's document, and which ranks ended."""

    def __init__(self, orders: Mapping[str, HostOrder]) -> None:
        self._orders = orders
        self._last_words: dict[str, str] = {}
        self.endings = Endings(next(iter(orders.values())))
        self.document = ""
        self.files: dict[str, str] = {}

    def line(self, host: str, text: str, *, error: bool) -> None:
        """A line of a host: an answer of ours, or words; those of rank 0's host are shown."""
        told = None if error else _answer(text)
        if told is None:
            self._last_words[host] = text.strip() or self._last_words.get(host, "")
            if self._orders[host].first == 0:
                print(text, file=sys.stderr, flush=True)
        elif told.ended is not None:
            if told.ended.rank in self._orders[host].ranks:
                self.endings.add(told.ended, knows=True)
        elif self._orders[host].first == 0 and told.name and len(self.files) < MOST_FILES:
            self.files[told.name] = told.text[-LARGEST:]
        elif self._orders[host].first == 0 and told.document is not None:
            self.document = told.document

    def ended(self, host: str, status: int) -> None:
        """All ranks of a host that said nothing of their end ended with its command; rank 0 is told, for they cannot."""
        how = f"the command on {host} ended with status {status}"
        last = self._last_words.get(host, "")[:300]
        for rank in self._orders[host].ranks:
            if rank not in self.endings.told:
                self.endings.add(RankEnded(rank=rank, host=host, how=how, last_line=last))


def _answer(text: str) -> HostTold | None:
    """A line as ``on_host`` writes it; None for anything else, such as what a login script prints."""
    try:
        return msgspec.json.decode(text, type=HostTold)
    except msgspec.MsgspecError:
        return None
