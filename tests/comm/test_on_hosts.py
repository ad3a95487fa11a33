"""The ranks of a hostfile: one ssh a host, of which nothing is left; ssh and the ranks are stood in for by scripts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsdoctor.comm.command import start_on_hosts
from dsdoctor.comm.launch.start import host_orders
from dsdoctor.core.errors import UsageError
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import HostCommand, on_hosts
from tests.comm.left_over import left_over

SSH = """#!/bin/sh
# ssh OPTIONS HOST COMMAND; the dead hosts never answer
for last; do host=$word word=$last; done
echo "$host" >> "$CALLS"
case "$host" in dead*) exec sleep 600 ;; esac
exec sh -c "$last"
"""
PYTHON = """#!/bin/sh
# python -m dsdoctor.comm.launch.on_host ORDER, whose ranks take a moment; ends with its stdin
document='{"document":"all is well"}' kept='{"name":"rank-00000.log","text":"its end"}'
ended='{"ended":{"rank":0,"host":"x","how":null}}'
case "$3" in *'"first":0,'*) (sleep 1; echo "$document"; echo "$kept"; echo "$ended") & ;; esac
echo "words of a login script"
cat > /dev/null
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path


def orders(alive: int, dead: int, slots: int = 8, seconds: float = 30.0) -> "dict[str, object]":
    names = [*(f"n{number}" for number in range(alive)), *(f"dead{number}" for number in range(dead))]
    hosts = [Slots(name=name, slots=slots, line=line) for line, name in enumerate(names, 1)]
    return dict(host_orders(hosts, master="10.0.0.1", port=4711, token="t", seconds=seconds))


@pytest.mark.slow
def test_200_hosts_of_which_3_are_dead_take_one_connection_each_and_leave_nothing(stand_ins: Path) -> None:
    began = time.monotonic()
    told = start_on_hosts(
        orders(197, 3),  # type: ignore[arg-type]
        python=str(stand_ins / "python"),
        folder=str(stand_ins),
        variables={},
        seconds=30.0,
        ssh=(str(stand_ins / "ssh"), "-T"),
    )
    took = time.monotonic() - began

    assert told.document == "all is well"
    assert told.files == {"rank-00000.log": "its end"}
    assert sorted((stand_ins / "calls").read_text().split()) == sorted(orders(197, 3))
    assert took < 30
    until = time.monotonic() + 30
    while left_over(str(stand_ins / "calls")) and time.monotonic() < until:
        time.sleep(0.1)
    assert left_over(str(stand_ins / "calls")) == []


@pytest.mark.slow
def test_a_host_whose_command_ends_ends_its_ranks(stand_ins: Path) -> None:
    told = start_on_hosts(
        orders(2, 0, slots=2),  # type: ignore[arg-type]
        python="/no/such/python",
        folder=str(stand_ins),
        variables={},
        seconds=10.0,
        ssh=(str(stand_ins / "ssh"),),
    )

    assert [(rank.rank, rank.host) for rank in told.ended] == [(0, "n0"), (1, "n0"), (2, "n1"), (3, "n1")]
    assert told.ended[0].how == "the command on n0 ended with status 127"
    assert "not found" in told.ended[0].last_line
    assert told.document == ""


@pytest.mark.slow
def test_a_deadline_is_kept_where_no_host_answers(stand_ins: Path) -> None:
    began = time.monotonic()
    told = start_on_hosts(
        orders(0, 2),  # type: ignore[arg-type]
        python="python3",
        folder="/",
        variables={},
        seconds=0.4,
        ssh=(str(stand_ins / "ssh"),),
    )

    assert (told.document, time.monotonic() - began < 40) == ("", True)


def test_more_hosts_than_files_may_be_opened_are_refused_before_anything_starts() -> None:
    many = [HostCommand(host="n1", command="true")] * 1_000_000

    with pytest.raises(UsageError, match="1000000 hosts take 3000064 open files"):
        on_hosts(many, None, ssh=("ssh",), seconds=1.0, until=bool)  # type: ignore[arg-type]


HEAD = """
import sys
sys.path.insert(0, {root!r})
from tests.comm.test_on_hosts import orders
from dsdoctor.comm.command import start_on_hosts
start_on_hosts(orders(3, 1), python={python!r}, folder="/", variables={{}}, seconds=600.0, ssh=({ssh!r},))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_head_that_is_ended_leaves_nothing(number: int, stand_ins: Path) -> None:
    (stand_ins / "python").write_text("#!/bin/sh\ncat > /dev/null\n")
    ssh, python = str(stand_ins / "ssh"), str(stand_ins / "python")
    text = HEAD.format(root=str(Path(__file__).parents[2]), python=python, ssh=ssh)
    head = subprocess.Popen([sys.executable, "-c", text], env=os.environ | {"CALLS": str(stand_ins / "calls")})
    marker = str(stand_ins / "calls")
    until = time.monotonic() + 120
    while not (stand_ins / "calls").exists() or len((stand_ins / "calls").read_text().split()) < 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    head.send_signal(number)
    head.wait(120)
    while (rest := [line for line in left_over(marker) if "sleep 600" not in line]) and time.monotonic() < until:
        time.sleep(0.05)

    assert rest == []


@pytest.mark.launch
def test_the_ranks_of_a_host_end_when_its_stdin_closes(tmp_path: Path) -> None:
    order = {
        "first": 1, "count": 2, "world": 3, "master": "127.0.0.1", "port": 29877, "token": "t", "hosts": "",
        "seconds": 600.0, "arguments": ["--quick", "--backend", "gloo", "--deadline", "550"],
    }  # fmt: skip
    argv = [sys.executable, "-m", "dsdoctor.comm.launch.on_host", json.dumps(order)]
    marker = f"on-host-test-{os.getpid()}"
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, "MARK": marker}) as process:
        assert process.stdin is not None
        until = time.monotonic() + 120
        while len([line for line in left_over(marker) if "dsdoctor.comm " in line]) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len([line for line in left_over(marker) if "dsdoctor.comm " in line]) >= 2
        process.stdin.close()
        process.wait(120)

    assert left_over(marker) == []
