"""Error counters of a host before and after a test: what rose is told, by host; a counter that was reset says nothing."""

import pytest

from dsdoctor.comm.local.facts import COUNTER_CHECKS, read_counters, rose
from dsdoctor.core.finding import Severity
from tests.conftest import Disk

HOSTS = ("a",) * 8 + ("b",) * 8
NET, PORT = "/sys/class/net/eth0", "/sys/class/infiniband/mlx5_0/ports/1"
LOG = "#!/bin/sh\ncat <<'E'\n[1.0] usb 1-1: new\n[7.1] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\nE\n"
FILES = {
    f"{NET}/statistics/rx_crc_errors": "7\n",
    f"{NET}/statistics/rx_errors": "0\n",
    f"{NET}/carrier_changes": "2\n",
    "/sys/class/net/lo/statistics/rx_errors": "5\n",
    f"{PORT}/counters/symbol_error": "12\n",
    f"{PORT}/hw_counters/out_of_sequence": "4\n",
    "/proc/net/snmp": "Ip: a\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 1000 3\n",
    "/proc/driver/nvidia/version": "",
    "/bin/dmesg": LOG,
    "/bin/nvidia-smi": "#!/bin/sh\necho '0, 3, 1'; echo '1, [N/A], [N/A]'\n",
}
READ = {
    "link eth0 rx_crc_errors": 7,
    "link eth0 carrier_changes": 2,
    "link mlx5_0 port 1 symbol_error": 12,
    "link mlx5_0 port 1 out_of_sequence": 4,
    "sent": 1000,
    "retransmitted": 3,
    "GPU 0000:3b:00 Xid 79": 1,
    "GPU 0 ECC corrected": 3,
    "GPU 0 ECC uncorrected": 1,
}


def told(seen: dict[str, dict[str, int]]) -> list[tuple[str, Severity, str]]:
    return [(finding.rule, finding.severity, finding.title) for check in COUNTER_CHECKS for finding in check(seen)]


def test_every_counter_of_a_host_is_read(disk: Disk) -> None:
    assert read_counters(disk(FILES, PATH="/bin")) == READ


def test_a_host_without_any_has_none(disk: Disk) -> None:
    assert read_counters(disk({"/proc/net/snmp": "Tcp: nonsense\n"})) == {}


@pytest.mark.parametrize("name", READ)
def test_what_rose_is_told_with_its_host_and_nothing_else(name: str) -> None:
    after = {**READ, name: READ[name] + 400}
    found = told(rose({0: READ, 8: READ}, {0: READ, 8: after}, HOSTS))

    rule = {"l": "link-errors-rose", "G": "gpu-errors-rose", "r": "tcp-resends"}.get(name[0])
    grave = name[0] == "G" and "ECC corrected" not in name
    assert [(one[0], one[1]) for one in found] == (
        [(rule, Severity.ERROR if grave else Severity.WARNING)] if rule else []
    )
    assert all(one[2].startswith("b") for one in found)
    assert told(rose({0: after}, {0: READ}, HOSTS)) == []


def test_hosts_with_the_same_trouble_are_one_finding() -> None:
    before = {number: {"link eth0 rx_errors": 1} for number in range(20)}
    after = {rank: {"link eth0 rx_errors": 9} for rank in before}

    assert told(rose(before, after, [f"gpu{number:02d}" for number in range(20)])) == [
        ("link-errors-rose", Severity.WARNING, "gpu[00-19]: link errors increased during the test")
    ]


@pytest.mark.parametrize(("again", "sent", "lossy"), [(49, 1000, False), (50, 1000, True), (50, 100_000, False)])
def test_some_segments_are_always_sent_again(again: int, sent: int, *, lossy: bool) -> None:
    assert bool(told({"a": {"retransmitted": again, "sent": sent}})) is lossy
