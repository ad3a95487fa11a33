"""Host -> its error counters: of links, of TCP, of GPUs. And two readings of each host -> what rose meanwhile. Needs no root.

Only what is not zero is kept. "retransmitted" and "sent" are TCP segments of the whole host, or of its network namespace.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import Host
from dsdoctor.core.text import and_more_lines
from dsdoctor.ranks.nodelist import in_words
from dsdoctor.rules import book

Counters = dict[str, int]
OF_INTERFACES = (
    *("statistics/rx_errors", "statistics/tx_errors", "statistics/rx_crc_errors", "statistics/rx_missed_errors"),
    *("statistics/tx_carrier_errors", "carrier_changes"),
)
OF_PORTS = (
    *("counters/symbol_error", "counters/link_error_recovery", "counters/link_downed", "counters/port_rcv_errors"),
    *("counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors"),
    *("hw_counters/out_of_sequence", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err"),
)
"""Of a port of InfiniBand or RoCE: on the wire, then what the adapter had to send again."""
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
LINK, GPU = "link ", "GPU "
MAX_LINES = 8
LOSSY, MIN_RESENT = 0.01, 50
"""The part of all segments, and their number, from which sending again is no chance."""


def read_counters(host: Host) -> Counters:
    """What this host counts now."""
    found = {**dict(_of_links(host)), **parse_snmp(host.read("/proc/net/snmp") or ""), **_of_gpus(host)}
    return {name: count for name, count in found.items() if count}


def _of_links(host: Host) -> Iterator[tuple[str, int]]:
    wires = {path: path.split("/")[4] for path in host.glob("/sys/class/net/*") if not path.endswith("/lo")}
    ports = {path: path.split("/")[4] for path in host.glob("/sys/class/infiniband/*/ports/*")}
    ports = {path: f"{device} port {path.rsplit('/', 1)[1]}" for path, device in ports.items()}
    of_wires = [(path, name) for path in wires for name in OF_INTERFACES]
    of_ports = [(path, name) for path in ports for name in OF_PORTS]
    for path, name in (*of_wires, *of_ports):
        text = (host.read(f"{path}/{name}") or "").strip()
        if text.isdecimal():
            yield f"{LINK}{(wires | ports)[path]} {name.rsplit('/', 1)[-1]}", int(text)


def parse_snmp(text: str) -> Counters:
    """The segments that TCP sent, and sent again, in /proc/net/snmp.

    >>> parse_snmp("Tcp: InSegs OutSegs RetransSegs\\nTcp: 7 900 12\\n")
    {'sent': 900, 'retransmitted': 12}
    """
    lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        return {}
    known = dict(zip(*lines, strict=True))
    return {name: int(known.get(key, 0)) for name, key in (("sent", "OutSegs"), ("retransmitted", "RetransSegs"))}


def _of_gpus(host: Host) -> Counters:
    """What the driver wrote to the kernel's log, and the errors of memory; nothing where no driver is loaded."""
    if not host.exists("/proc/driver/nvidia") or (dmesg := host.which("dmesg")) is None:
        return {}
    found = parse_xids(host.run([dmesg], timeout=5).stdout)
    smi = host.which("nvidia-smi")
    if smi is not None:
        asked = "index,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total"
        answer = host.run([smi, f"--query-gpu={asked}", "--format=csv,noheader"], timeout=10)
        found.update(parse_ecc(answer.stdout))
    return found


def parse_xids(text: str) -> Counters:
    """How often each GPU reported each Xid.

    >>> parse_xids("[7.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\\n")
    {'GPU 0000:3b:00 Xid 79': 1}
    """
    return dict(Counter(f"{GPU}{bus} Xid {number}" for bus, number in XID.findall(text)))


def parse_ecc(text: str) -> Counters:
    """Errors of memory since the driver was loaded, by GPU.

    >>> parse_ecc("0, 3, 0\\n1, [N/A], [N/A]\\n")
    {'GPU 0 ECC corrected': 3, 'GPU 0 ECC uncorrected': 0}
    """
    found: Counters = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and all(part.isdecimal() for part in parts):
            found[f"{GPU}{parts[0]} ECC corrected"] = int(parts[1])
            found[f"{GPU}{parts[0]} ECC uncorrected"] = int(parts[2])
    return found


Rose = Mapping[str, Counters]
"""By host: what its counters rose by during the test."""


def rose(before: Mapping[int, Counters], after: Mapping[int, Counters], hosts: Sequence[str]) -> Rose:
    """The difference of two readings by the first rank of each host. What became smaller was reset meanwhile, and says nothing."""
    found: dict[str, Counters] = {}
    for rank in sorted(before.keys() & after.keys()):
        changes = {name: count - before[rank].get(name, 0) for name, count in after[rank].items()}
        found.setdefault(hosts[rank], {}).update({name: by for name, by in changes.items() if by > 0})
    return found


def _of(seen: Rose, kind: str) -> dict[str, Counters]:
    """The counters of a kind, of the hosts that have any."""
    mine = {
        host: {name.removeprefix(kind): count for name, count in counts.items() if name.startswith(kind)}
        for host, counts in seen.items()
    }
    return {host: counts for host, counts in mine.items() if counts}


def link_errors_rose(seen: Rose) -> Iterator[Finding]:
    """The error counters of a network interface or fabric port rose during the test, or its link went down for a moment."""
    if found := _of(seen, LINK):
        yield book.finding("link-errors-rose", Severity.WARNING, evidence=_lines(found), hosts=in_words(found))


def gpu_errors_rose(seen: Rose) -> Iterator[Finding]:
    """A GPU reported an error of its own during the test: an Xid in the kernel's log, or errors of its memory."""
    found = _of(seen, GPU)
    grave = {host: counts for host, counts in found.items() if any("ECC corrected" not in name for name in counts)}
    light = {host: counts for host, counts in found.items() if host not in grave}
    for hosts, severity in ((grave, Severity.ERROR), (light, Severity.WARNING)):
        if hosts:
            yield book.finding("gpu-errors-rose", severity, evidence=_lines(hosts), hosts=in_words(hosts))


def tcp_resends(seen: Rose) -> Iterator[Finding]:
    """A host had to send many TCP segments again during the test."""
    for host, counts in seen.items():
        again, sent = counts.get("retransmitted", 0), counts.get("sent", 0)
        if again >= MIN_RESENT and again > LOSSY * sent:
            yield book.finding("tcp-resends", Severity.WARNING, host=host, again=f"{again:,}", sent=f"{sent:,}")


def _lines(found: Mapping[str, Counters]) -> tuple[str, ...]:
    """What rose, a line for each host."""
    lines = [f"{host}: {', '.join(f'{name} +{by}' for name, by in counts.items())}" for host, counts in found.items()]
    return tuple(and_more_lines(lines, MAX_LINES, of="hosts"))


CHECKS = (link_errors_rose, gpu_errors_rose, tcp_resends)
