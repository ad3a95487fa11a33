"""What other users of a machine or a network may try with the supervisors' messages: forge, flood, stall, stop."""

import contextlib
import hashlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.hang.channel import (
    HELLO,
    MAX_STRANGERS,
    NONCE_BYTES,
    SECRET_FILE,
    Answer,
    Listener,
    NodeReport,
    Nodes,
    RunIdentity,
    Sent,
    identity,
    send_report,
    shared_secret,
)
from dsdoctor.hang.models import HangOptions
from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.supervisor import HANGS, Judgement, Supervisor, Task
from tests.each import each
from tests.hang.made import calling, elsewhere, incident, view
from tests.hang.test_parts import run_on

ANSWER = Answer(host="node1", ranks=(0,), told=True)
REPORT = NodeReport(host="node2", still=7.0, ranks=(2,), views=(view(2, elsewhere(), 55),))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def listening() -> Iterator[tuple[Listener, RunIdentity]]:
    run = run_on(free_port())
    listener = Listener(run, ANSWER)
    yield listener, run
    listener.close()


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def test_who_calls_and_says_nothing_keeps_no_node_waiting_and_fills_no_table() -> None:
    with listening() as (listener, run), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(stranger(run.ports[0])) for _ in range(2 * MAX_STRANGERS)]
        sent = send_report(run, REPORT)
        # those of before had to make room
        closed = [each for each in idle[: MAX_STRANGERS // 2] if each.recv(NONCE_BYTES) and not each.recv(1)]

        assert sent == Sent(answer=ANSWER)
        assert [report for _, report in listener.reports(0.0)] == [REPORT]
        assert len(closed) == MAX_STRANGERS // 2
        assert len(listener._open) <= MAX_STRANGERS


def test_nothing_is_read_of_a_report_before_its_sender_is_known() -> None:
    with listening() as (listener, run), stranger(run.ports[0]) as forger:
        forger.recv(NONCE_BYTES)
        # the length of a report that would fill the memory, without the secret
        forger.sendall(HELLO.pack(os.urandom(NONCE_BYTES), (1 << 32) - 1, bytes(32)))
        end = forger.recv(1)

        assert end == b""
        assert listener.reports(0.0) == []


def test_a_message_that_was_overheard_is_of_no_use_again() -> None:
    with listening() as (listener, run):
        overheard: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as between:
            relay = threading.Thread(target=pass_on, args=(between, run.ports[0], overheard))
            relay.start()
            sent = send_report(replace(run, ports=(between.getsockname()[1],)), REPORT)
            relay.join()
        listener.reports(0.0)
        with stranger(run.ports[0]) as forger:
            forger.recv(NONCE_BYTES)
            forger.sendall(overheard[0][: HELLO.size])
            end = forger.recv(1)

        assert sent == Sent(answer=ANSWER)
        assert end == b""


def pass_on(between: socket.socket, port: int, overheard: list[bytes]) -> None:
    """Between a node and rank 0's: hear what the node says."""
    with between.accept()[0] as node, stranger(port) as leader:
        node.sendall(leader.recv(NONCE_BYTES))
        overheard.append(node.recv(HELLO.size))
        leader.sendall(overheard[0])
        back = threading.Thread(target=copy, args=(leader, node))
        back.start()
        copy(node, leader)
        back.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    while part := source.recv(1 << 16):
        target.sendall(part)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_who_took_the_port_first_gets_no_report_and_its_answer_is_no_answer() -> None:
    heard: list[bytes] = []

    def squat(taken: socket.socket) -> None:
        with taken.accept()[0] as node:
            node.sendall(bytes(NONCE_BYTES))
            heard.append(node.recv(HELLO.size))
            # "stop", signed with what everybody knows
            text = b'{"host":"node1","told":true,"stop":true}'
            node.sendall(bytes(32) + struct.pack("<I", len(text)) + hashlib.sha256(text).digest() + text)
            with contextlib.suppress(ConnectionResetError):
                while part := node.recv(1 << 16):
                    heard.append(part)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        thread = threading.Thread(target=squat, args=(taken,))
        thread.start()
        sent = send_report(run_on(taken.getsockname()[1]), REPORT)
        thread.join()

    assert sent == Sent(unproven=True)
    assert [len(part) for part in heard] == [HELLO.size]


def test_a_watch_with_another_secret_is_no_host_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the node of rank 0 has, or lacks, what the others know: it was begun anew, and its store too."""
    monkeypatch.delenv("DSDOCTOR_HANG_TOKEN", raising=False)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / SECRET_FILE).write_text("ab" * 32)
    run = replace(run_on(free_port()), secret=b"")
    leader, other = Nodes(run, "node1", "a", folders[0]), Nodes(run, "node2", "b", folders[1])
    leader.take(ANSWER)
    taking = threading.Thread(target=leader.take, args=(ANSWER, 5.0), kwargs={"enough": 1})
    taking.start()
    known = other.send(REPORT)
    taking.join()
    (folders[0] / SECRET_FILE).write_text("cd" * 32)
    leader.take(ANSWER)
    made = incident(view(1, calling("all_reduce"), 5, world=2), world=2)
    told = []
    for gone in (False, True):
        if gone:
            leader.close()
        for _ in range(2):
            other.send(REPORT)
            time.sleep(0.05)
        told.append(other.without_leader(made, 0.01).left_hosts)

    assert known
    assert told == [{}, {ANSWER.host: ANSWER.ranks}]


def test_what_everybody_knows_of_a_job_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSDOCTOR_HANG_TOKEN", raising=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "7"}
    run = identity(env, user=1)
    with_token = identity({**env, "DSDOCTOR_HANG_TOKEN": "x"}, user=1)
    assert run and with_token
    run = replace(run, ports=(free_port(),))
    leader, other = Nodes(run, "node1", "a", tmp_path), Nodes(run, "node2", "b", tmp_path)
    leader.take(ANSWER)
    unknown = (other.send(REPORT), leader._listener)
    (tmp_path / SECRET_FILE).write_text("ab" * 32)
    leader.take(ANSWER)
    known = other.send(REPORT)
    leader.take(ANSWER, 1.0, enough=1)
    leader.close()

    assert (run.secret, len(with_token.secret)) == (b"", 32)
    assert unknown == (False, None)
    assert known
    assert list(leader._ranks.values()) == [(2,)]
    assert with_token.key.encode() not in with_token.secret.hex().encode()


@each("on_hang", ["report", "stop"])
def test_another_node_ends_the_ranks_only_of_a_node_that_was_reported_to(on_hang: str, tmp_path: Path) -> None:
    run = run_on(free_port())
    listener = Listener(run, replace(ANSWER, stop=True))
    folder = tmp_path / on_hang
    folder.mkdir()
    with subprocess.Popen(["sleep", "600"]) as rank:
        writer = RingWriter(folder / f"rank-00001-{rank.pid}.ring")
        writer.write(b'{"rank":1,"world":2,"pid":1,"time":0}', clock=time.monotonic(), progress=1, stack=1, flags=0)
        supervisor = Supervisor(task_of(folder, run, on_hang))
        for _ in range(3):
            supervisor.node.look()
            supervisor.node.look_at_children()
        time.sleep(0.02)
        supervisor.decide()
        ended = rank.wait(timeout=60) if on_hang == "stop" else rank.poll()
        rank.kill()
    writer.close()
    listener.close()

    assert supervisor.nodes.answer is not None
    assert supervisor.nodes.answer.stop
    assert ended == (None if on_hang == "report" else -9)


def task_of(folder: Path, run: RunIdentity, on_hang: str) -> Task:
    return Task(
        folder=folder,
        options=HangOptions(after=0.001, on_hang=on_hang),
        run=run,
        host="node2",
        tell=lambda *_: None,
        write=lambda _: None,
        mention=lambda *_: None,
        judge=lambda _: Judgement(state=HANGS),
    )


class Answering:
    """A store that answers what it likes."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def compare_set(self, *_: object) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_store_that_answers_anything_else_gives_no_secret() -> None:
    answers: list[Any] = [b"", b"x" * 64, "ab" * 32 + "\n", None, 7, RuntimeError("no compare_set"), b"ab" * 31]

    assert [shared_secret(Answering(answer)) for answer in answers] == [""] * len(answers)
    assert shared_secret(Answering(b"ab" * 32)) == "ab" * 32


STORES = """
import os, sys
import torch.distributed as dist
from dsdoctor.hang.channel import shared_secret
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ranks = [dist.PrefixStore("default_pg", dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)) for _ in range(2)]
print(*map(shared_secret, ranks))
print(*[repr(shared_secret(dist.FileStore(sys.argv[1], 2))) for _ in range(2)])
"""


@pytest.mark.slow
def test_the_jobs_own_store_gives_all_ranks_one_random_secret_and_keeps_none_waiting(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STORES, str(tmp_path / "store")]
    done = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout for _ in range(2)]
    secrets = [text.split() for text in done]

    assert all(len(first) == 64 and first == second for first, second, *_ in secrets)
    assert secrets[0][0] != secrets[1][0]
    # a store's file may be read by others
    assert [secret[2:] for secret in secrets] == [["''", "''"]] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


WAITED_FOR = """
import datetime, os, threading, time
import torch.distributed as dist
from dsdoctor.hang.channel import shared_secret
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
waiting = threading.Thread(target=lambda: store.wait(["stop"], datetime.timedelta(seconds=60)), daemon=True)
waiting.start()
time.sleep(1)
secret = shared_secret(store)
print(len(secret), waiting.is_alive(), flush=True)
os._exit(0)  # torch ends a process whose thread still waits with an abort
"""


@pytest.mark.slow
def test_a_store_that_another_thread_of_the_script_waits_on_keeps_no_rank_waiting() -> None:
    done = subprocess.run([sys.executable, "-c", WAITED_FOR], capture_output=True, text=True, check=True, timeout=100)

    assert done.stdout.split() == ["64", "True"]
