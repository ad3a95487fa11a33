"""The rig itself: its nodes are like machines, its faults do what they say, and nothing is left of it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.comm import faults
from tests.comm.conftest import need
from tests.comm.jobs import PLAIN, job
from tests.comm.rig import Rig, missing

pytestmark = pytest.mark.launch

SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=3) as to:
    to.sendall(bytes(int(sys.argv[2])))
    to.shutdown(socket.SHUT_WR)
    print(to.recv(1).decode(), time.monotonic() - began)
"""
RECEIVE = """
import socket
listener = socket.create_server(("", 7000))
print("ready", flush=True)
while True:
    to, _ = listener.accept()
    while to.recv(1 << 16):
        pass
    to.sendall(b"!")
"""


def took(rig: Rig, source: int, target: int, size: int) -> float | str:
    """Seconds for a message from node to node, or the last line of what went wrong."""
    done = rig[source].run([sys.executable, "-c", SEND, rig[target].address, str(size)], timeout=20)
    return float(done.stdout.split()[1]) if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.fixture
def talking(rig: Rig) -> Rig:
    """A rig with a server on each node that takes messages."""
    for node in rig.nodes:
        server = node.popen([sys.executable, "-c", RECEIVE])
        assert server.stdout and server.stdout.readline() == "ready\n"
    return rig


def test_a_node_has_its_own_name_addresses_processes_and_shared_memory(tmp_path: Path) -> None:
    need(missing())
    (tmp_path / "shared").write_text("by all")
    with Rig(tmp_path / "rig", links=2) as rig:
        ask = f"hostname; ls /sys/class/net | xargs; ls /dev/shm | wc -l; ls /proc | grep -c ^1$; cat {tmp_path}/shared"
        touched = rig[0].run(["touch", "/dev/shm/mine"])
        told = rig[1].run(["sh", "-c", ask]).stdout.split("\n")
        names = rig[1].run(["getent", "hosts", "nodea", "nodeb"]).stdout.split()

    assert touched.returncode == 0
    assert told == ["nodeb", "eth0 eth1 lo", "0", "1", "by all"]
    assert names == ["10.200.0.1", "nodea", "10.200.0.2", "nodeb"]


def test_nothing_is_left_of_a_rig_whose_process_was_killed(tmp_path: Path) -> None:
    need(missing())
    script = f"""
        import time
        from pathlib import Path
        from tests.comm.rig import Rig
        with Rig(Path({str(tmp_path / "rig")!r})) as rig:
            rig[1].popen(["setsid", "sleep", "4711.5"])
            print(rig[0].pid, rig[1].pid, rig.switch.pid, flush=True)
            time.sleep(60)
    """
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=root)
    assert process.stdout
    pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    gone = time.monotonic() + 60
    while (left := _alive(pids)) and time.monotonic() < gone:
        time.sleep(0.05)

    assert len(pids) == 3
    assert left == []


def _alive(pids: list[bytes]) -> list[str]:
    known = [f"/proc/{pid.decode()}" for pid in pids if Path(f"/proc/{pid.decode()}").exists()]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"4711.5" in (folder / "cmdline").read_bytes().split(b"\0"):
                known.append(str(folder))
    return known


def test_two_rigs_do_not_meet(tmp_path: Path) -> None:
    need(missing())
    with Rig(tmp_path / "one") as rig, Rig(tmp_path / "other") as other, faults.squatter(rig[0], 29500):
        own = rig[1].run([sys.executable, "-c", "import socket; socket.create_connection(('nodea', 29500), 2)"])
        foreign = other[1].run([sys.executable, "-c", "import socket; socket.create_connection(('nodea', 29500), 2)"])

    assert own.returncode == 0
    assert "ConnectionRefusedError" in foreign.stderr


def test_faults_of_packets_do_what_they_say_and_end(talking: Rig) -> None:
    rig = talking
    told = {}
    with faults.everything_dropped(rig[1]):
        told["dropped"] = took(rig, 0, 1, 1)
    with faults.cable_pulled(rig, 1):
        told["pulled"] = took(rig, 0, 1, 1)
    with faults.link_down(rig[1]):
        told["down"] = took(rig, 1, 0, 1)
    with faults.one_port_open(rig[1], 29500):
        told["one port"] = took(rig, 0, 1, 1)
    with faults.port_rejected(rig[1], 7000):
        told["rejected"] = took(rig, 0, 1, 1)
    with faults.one_way(rig[1], rig[0]):
        told["there"], told["back"] = took(rig, 0, 1, 1), took(rig, 1, 0, 1)
    with faults.mtu_hole(rig):
        told["small"], told["large"] = took(rig, 0, 1, 400), took(rig, 0, 1, 1 << 20)
    with faults.slow_node(rig, 1):
        told["slow"], told["slow back"] = took(rig, 0, 1, 4 << 20), took(rig, 1, 0, 4 << 20)
    # a link that is still slow takes longer every time; one that is well does so once in a while, on a busy machine
    well = [any(took(rig, *way, 4 << 20) < 0.3 for _ in range(20)) for way in ((0, 1), (1, 0))]

    assert {name for name, value in told.items() if isinstance(value, float)} == {"back", "small", "slow", "slow back"}
    assert "No route to host" in told["rejected"]
    assert "unreachable" in told["down"]
    assert all("timed out" in told[name] for name in ("dropped", "one port", "there", "large"))
    assert told["slow"] > 0.35 and told["slow back"] > 0.35
    assert well == [True, True]


def test_loss_is_between_one_pair_only(wide_rig: Rig) -> None:
    rig = wide_rig
    ping = ["ping", "-c", "400", "-i", "0.002", "-q"]
    with faults.lossy(rig[1], rig[0], 0.03):
        lost = rig[0].run([*ping, "nodeb"]).stdout
        well = rig[0].run([*ping, "nodec"]).stdout + rig[1].run([*ping, "nodec"]).stdout

    assert well.count(" 0% packet loss") == 2
    assert " 0% packet loss" not in lost


def test_files_and_ports_can_be_ill(rig: Rig) -> None:
    ask = "import os, socket; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize >> 20, socket.gethostbyname('nodeb'))"
    with (
        faults.small_shm(rig[1]),
        faults.name_on_loopback(rig, rig[1]),
        faults.squatter(rig[0], 29500, "SSH-2.0-x\r\n"),
    ):
        problem = rig[1].run([sys.executable, "-c", ask]).stdout.split()
        hear = "import socket; print(socket.create_connection(('nodea', 29500), 3).recv(99))"
        banner = rig[1].run([sys.executable, "-c", hear]).stdout
    well = rig[1].run([sys.executable, "-c", ask]).stdout.split()

    assert problem == ["64", "127.0.1.1"]
    assert banner == "b'SSH-2.0-x\\r\\n'\n"
    assert int(well[0]) > 1000
    assert well[1] == "10.200.0.2"


def test_a_plain_script_meets_over_the_rig_and_its_ranks_can_be_held_frozen_and_killed(
    rig: Rig, tmp_path: Path
) -> None:
    env = faults.customized(tmp_path / "site", faults.held(tmp_path, call=2))
    with job(rig, [str(PLAIN), "20"], own={0: env, 1: env}) as running:
        held = running.watch(60, lambda: all((tmp_path / f"held-{rank}").exists() for rank in (0, 1)))
        assert held, running.told()
        with faults.frozen_rank(rig, 1, "plain.py"):
            (pid,) = faults.processes(rig, 1, "plain.py")
            until, state = time.monotonic() + 20, ""
            # a signal is sent before its process knows of it
            while state != "T" and time.monotonic() < until:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        faults.kill_rank(rig, 1, "plain.py")
        (tmp_path / "go").touch()
        ended = running.wait(30)

    assert ended, running.told()
    assert state == "T"
    assert running.ends["1"][0] == -signal.SIGKILL
    assert running.ends["0"][0] == 1
    assert "RuntimeError" in running.err("0")


def test_one_rank_can_have_another_torch_and_contribute_wrong_data(rig: Rig, tmp_path: Path) -> None:
    env = faults.customized(tmp_path / "site", faults.other_torch("2.7.0+cpu"), faults.flipped_bit(byte=2, bit=128))
    ask = (
        "import torch; print(torch.__version__); import torch.distributed as d; d.init_process_group('gloo');"
        "x = torch.ones(32); d.all_reduce(x); print((x != 2).nonzero().tolist()); import time; time.sleep(1)"
    )
    with job(rig, ["-c", ask], own={1: env}) as running:
        assert running.wait(60), running.told()

    assert running.out("0").splitlines()[1] == running.out("1").splitlines()[1] == "[[16]]", running.told()
    assert running.out("0").splitlines()[0] != running.out("1").splitlines()[0] == "2.7.0+cpu"


def test_the_machine_itself_is_as_before(tmp_path: Path) -> None:
    need(missing())
    before = sorted(name for _, name in socket.if_nameindex()), os.uname().nodename, Path("/etc/hosts").read_text()
    with pytest.raises(KeyboardInterrupt), Rig(tmp_path / "rig"):
        raise KeyboardInterrupt
    after = sorted(name for _, name in socket.if_nameindex()), os.uname().nodename, Path("/etc/hosts").read_text()

    assert before == after
