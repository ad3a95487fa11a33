"""A run over two nodes of a rig: the network between them is cut, and the host of rank 0 is gone. Needs root and namespaces."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.cli.hang import judge_folder
from dsdoctor.hang.channel import Answer, NodeReport, Nodes, node_id, node_name
from dsdoctor.hang.incidents import read_ranks, write_ranks
from dsdoctor.hang.models import Incident
from tests.comm.conftest import need
from tests.comm.rig import Node, Rig, missing, port_of
from tests.hang.made import calling, elsewhere, incident, view
from tests.hang.test_parts import run_on

PLAIN = str(Path(__file__).with_name("plain.py"))
AFTER = 6


def running(nodes: Sequence[Node], port: int) -> "list[subprocess.Popen[str]]":
    """A rank on each node, started as a cluster's own script does; the hang's files go into a folder of each node."""
    command = [sys.executable, "-m", "dsdoctor.run", "--hang-after", str(AFTER), "--hang-dir", "hang"]
    command += [PLAIN, "--steps", "4000", "--seconds", "0.05"]
    where = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [node.popen(command, env={**where, "RANK": str(rank)}) for rank, node in enumerate(nodes)]


def said(process: "subprocess.Popen[str]") -> str:
    """What dsdoctor printed, to the end of its first verdict."""
    lines = []
    assert process.stderr
    for line in process.stderr:
        lines += [line] if line.startswith("dsdoctor") else []
        if "files of all ranks" in line:
            break
    process.kill()
    return "".join(lines)


@pytest.mark.launch
def test_a_network_that_is_cut_and_a_host_of_rank_0_that_is_gone(tmp_path: Path) -> None:
    need(missing())
    with Rig(tmp_path / "rig", nodes=4) as rig:
        assert rig.switch
        processes = [*running(rig.nodes[:2], 29521), *running(rig.nodes[2:], 29522)]
        for process in processes:
            assert process.stdout
            assert "three steps" in process.stdout.readline()
        # the nodes have told each other of themselves
        time.sleep(AFTER / 2)
        began = time.monotonic()
        rig[1].net("ip", "link", "set", "eth0", "down")
        # a machine that loses power says no farewell
        rig.switch.net("ip", "link", "set", port_of(2), "down")
        rig[2].holder.kill()
        texts = [said(processes[number]) for number in (0, 1, 3)]
        seconds = time.monotonic() - began
        folders = [rig.folder / rig.names[number] / "hang" for number in (0, 1, 3)]
        alone = [judge_folder(folder)[1].findings[0] for folder in folders]
        for path in folders[0].iterdir():
            (folders[1] / path.name).write_bytes(path.read_bytes())
        together = judge_folder(folders[1])[1].findings[0]

    lost = [("nodeb", 1, 0), ("nodea", 0, 1), ("nodec", 0, 1)]
    for text, finding, (host, gone, waits) in zip(texts, alone, lost, strict=True):
        assert f"✗ {host} with rank {gone} is unreachable; rank {waits} is blocked in all_reduce" in text, text
        assert (finding.rule, f"{host} with rank {gone}" in finding.title) == ("hang-host-gone", True)
    assert together.rule == "hang-network-cut"
    # long before torch gives up after half an hour, on a full machine too
    assert seconds < 300


ANSWER = Answer(host="node1", ranks=(0,))


def handed(report: NodeReport) -> tuple[Nodes, Nodes]:
    """The node of rank 0, which has taken another's report, and that other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    leader, other = Nodes(run_on(port), "node1"), Nodes(run_on(port), "node2")
    leader.take(ANSWER)
    sender = threading.Thread(target=other.send, args=(report,))
    sender.start()
    leader.take(ANSWER, 0.2, enough=1)
    sender.join()
    return leader, other


HELLO = NodeReport(host="", still=0.0, ranks=(1,))
SEEN = NodeReport(host="", still=7.0, ranks=(1,), views=(view(1, elsewhere(), 55, world=2),))


def own() -> Incident:
    return incident(view(0, calling("all_reduce"), 56, world=2), world=2)


@pytest.mark.parametrize("report", [HELLO, SEEN], ids=["fell silent", "reported"])
def test_a_node_that_was_there_and_falls_silent_is_known_by_its_ranks(report: NodeReport) -> None:
    leader, other = handed(report)
    early = leader.joined(own(), 60.0, ANSWER, together=0.0)
    time.sleep(0.05)
    late = leader.joined(own(), 0.04, ANSWER, together=0.0)
    leader.close()

    silent = report is HELLO
    assert other.answer == ANSWER
    assert (early.silent_hosts, leader.is_elsewhere_alive(early)) == ({}, silent)
    assert late.silent_hosts == ({"node2": (1,)} if silent else {})
    assert not leader.is_elsewhere_alive(late)
    assert [each.rank for each in late.ranks] == ([0] if silent else [0, 1])


def test_a_leader_whose_machine_answers_without_a_watch_has_ended_and_once_is_not_enough() -> None:
    leader, other = handed(HELLO)
    leader.close()
    seen = []
    for _ in range(2):
        assert not other.send(SEEN)
        seen.append(other.without_leader(own(), 0.04).left_hosts)
        time.sleep(0.05)

    assert seen == [{}, {"node1": (0,)}]


def test_of_a_leader_that_never_answered_nothing_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = Nodes(run_on(port), "node2")
    for _ in range(2):
        other.send(SEEN)
        time.sleep(0.05)

    assert other.without_leader(own(), 0.04) == own()


def test_two_containers_of_one_host_name_are_two_nodes(tmp_path: Path) -> None:
    leader = Nodes(run_on(1), "node1", "a0")
    first = NodeReport(host="node2", node="b0", still=7.0, ranks=(1,), views=(view(1, elsewhere(), 55),))
    leader.note(first)
    leader.note(replace(first, node="c0", ranks=(2, 3), views=(view(2, elsewhere(), 55), view(3, elsewhere(), 55))))
    own_view = incident(view(0, calling("all_reduce"), 56))
    both = leader.joined(own_view, 60.0, ANSWER, together=0.0)
    quiet = Nodes(run_on(1), "node1", "a0")
    for node, ranks in (("b0", (1,)), ("c0", (2, 3))):
        quiet.note(replace(first, host="node1", node=node, ranks=ranks, views=()))
    time.sleep(0.05)
    lost = quiet.joined(own_view, 0.04, ANSWER, together=0.0)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    assert [each.rank for each in both.ranks] == [0, 1, 2, 3]
    assert lost.silent_hosts == {"node1/b0": (1,), "node1/c0": (2, 3)}
    assert not quiet.is_elsewhere_alive(lost)
    # in one process namespace, and each with a /dev/shm of its own
    assert len({node_id(folder) for folder in folders}) == 2
    assert node_id(folders[0]) == node_id(folders[0])


def test_what_files_say_of_two_nodes_with_one_name_is_joined(tmp_path: Path) -> None:
    for rank, ranks in ((0, (2,)), (1, (3,))):
        write_ranks(tmp_path, incident(view(rank, elsewhere(), 5), run="k", silent_hosts={"node2": ranks}))

    assert read_ranks(tmp_path).silent_hosts == {"node2": (2, 3)}


def test_two_nodes_with_the_same_name_are_told_apart_by_real_namespaces(tmp_path: Path) -> None:
    names = [node_name()]
    command = [sys.executable, "-c", "from dsdoctor.hang.channel import node_name; print(node_name())"]
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", *command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no namespace can be made here")
    names.append(done.stdout.strip())

    assert len(set(names)) == 2
    assert len({name.partition("/")[0] for name in names}) == 1
