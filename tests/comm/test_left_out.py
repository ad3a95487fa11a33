"""Hosts that are chosen, left out or bad: names in short, --include and --exclude, and a test that goes on without the bad ones."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.preflight.checks import LeftOut, bad_hosts, files_of, hosts_left_out, without
from dsdoctor.comm.results import Stuck, bad_ranks
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding
from dsdoctor.hosts.hostfile import Slots, chosen, parse_hostfile
from dsdoctor.ranks.nodelist import expand, fold, in_words
from tests.cli.runner import run as run_inside
from tests.comm.reports import healthy_4, missing_rank
from tests.comm.test_preflight import facts, visit

BEFORE = ("gpu", "n", "r1n", "a-", "10.0.0.", "x0")
BEHIND = ("", "-x", ".cl2.org", "-ib")


def generated(chance: random.Random) -> list[str]:
    names = [
        chance.choice(BEFORE) + str(chance.randint(0, 12)).zfill(chance.choice((1, 1, 2, 3, 4))) + chance.choice(BEHIND)
        for _ in range(chance.randint(1, 12))
    ]
    return names + chance.choice(([], ["login"], ["a.b", "node-x"]))


def test_names_in_short_are_the_same_names() -> None:
    chance = random.Random(1)
    for _ in range(300):
        names = generated(chance)

        assert sorted(expand(fold(names))) == sorted(set(names))
    assert fold(f"gpu{number:04d}" for number in (*range(95, 1100), 7)) == "gpu[0007,0095-1099]"
    assert len(in_words(f"n{2 * number}" for number in range(9999))) < 110


HOSTS = parse_hostfile("".join(f"n{number} slots=2\n" for number in (3, 1, 2))).hosts


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("n1", "n2", "--include and --exclude cannot be given together"),
        (None, "n1,n9", "--exclude names n9, but the hostfile has n[1-3]"),
        ("n1:0,1", None, "names slots"),
        (None, "n[1-3]", "leaves none of the 3 hosts"),
        ("n[1-", None, "--include: the node list 'n[1-' cannot be read"),
        ("", None, "--include: the node list '' cannot be read"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(include: str | None, exclude: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        chosen(HOSTS, include=include, exclude=exclude)


def test_every_choice_keeps_the_order_of_the_hostfile() -> None:
    for wanted in itertools.chain.from_iterable(itertools.permutations(("n1", "n2", "n3"), n) for n in (1, 2)):
        kept = [host for host in HOSTS if host.name in wanted]

        for text in (",".join(wanted), "@".join(wanted), fold(wanted)):
            assert list(chosen(HOSTS, include=text)) == kept
            assert list(chosen(HOSTS, exclude=text)) == [host for host in HOSTS if host not in kept]


LACKING = {
    "ssh failed": {"answered": False, "status": 255, "stderr": "Connection refused"},
    "no /p": {"python": False},
    "/p cannot import torch": {"modules": ("deepspeed", "dsdoctor")},
    "": {"modules": ("torch", "dsdoctor")},
}


@pytest.mark.parametrize(("why", "bad"), list(itertools.product(LACKING, ((0,), (2,), (1, 3), (0, 1, 2, 3)))))
def test_the_bad_hosts_are_those_that_cannot_take_part(why: str, bad: tuple[int, ...]) -> None:
    visits = [visit(f"n{number}", f"10.0.0.{number + 1}") for number in range(4)]
    visits = [replace(each, **LACKING[why]) if place in bad else each for place, each in enumerate(visits)]  # type: ignore[arg-type]
    asked = facts(*visits)

    found = bad_hosts(asked)

    assert list(found) == ([f"n{number}" for number in bad] if why else [])
    assert all(text.startswith(why) for text in found.values())
    assert bad_hosts(without(asked, found)) == {}


def left_out(bad: int, good: int, *, tested: bool = True) -> LeftOut:
    return LeftOut(
        hostfile="/job/hosts",
        bad={f"gpu{number:04d}": "does not answer" for number in range(bad)},
        good=tuple(Slots(name=f"gpu{number:04d}", slots=8, line=1) for number in range(bad, bad + good)),
        good_file="/out/good-hosts",
        bad_file="/out/bad-hosts",
        tested=tested,
    )


def test_both_lists_are_for_the_next_command() -> None:
    (finding,) = hosts_left_out(left_out(2, 3))
    (good, text), (bad, names) = files_of(left_out(2, 3))

    assert (good, [host.name for host in parse_hostfile(text).hosts]) == (
        "/out/good-hosts",
        ["gpu0002", "gpu0003", "gpu0004"],
    )
    assert (bad, names) == ("/out/bad-hosts", "gpu0000\ngpu0001\n")
    assert finding.title == "skipped 2 of 5 hosts: gpu[0000-0001]"
    assert finding.fix is not None
    assert finding.fix.commands == (
        "deepspeed --hostfile /out/good-hosts ...",
        "deepspeed --hostfile /job/hosts --exclude gpu0000@gpu0001 ...",
        "sbatch --exclude 'gpu[0000-0001]' ...",
    )
    assert [*hosts_left_out(left_out(0, 3)), *hosts_left_out(left_out(3, 0))] == []


def test_of_the_ranks_of_a_report_the_cause_is_bad_and_not_who_waits() -> None:
    died = Stuck(rank=2, at="all_reduce", step=3, seconds=1.0, ended="SIGKILL")
    waits = Stuck(rank=1, at="all_reduce", step=3, seconds=1.0)
    found = Finding.error("rank-died", "rank 2 (nodeb) died")
    phases = (replace(healthy_4().phases[0], state=PhaseState.BROKEN, findings=(found,)),)
    broken = replace(healthy_4(), state=PhaseState.BROKEN, stuck=(died, waits), phases=phases)

    assert bad_ranks(healthy_4()) == {}
    assert bad_ranks(missing_rank()) == {3: "it did not join the rendezvous"}
    assert bad_ranks(broken) == {2: "lost in all_reduce: SIGKILL"}
    assert bad_ranks(replace(broken, phases=healthy_4().phases)) == {}


SSH = """#!/bin/sh
# ssh OPTIONS HOST COMMAND: every host is this one; "down" refuses, "lame" answers and starts no rank
for last; do host=$word word=$last; done
case "$host $last" in
down*) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
lame*on_host*) echo "lame: quota exceeded" >&2; exit 3 ;;
esac
NAME=$host exec sh -c "$last"
"""
NAMES = """#!/bin/sh
# hostname -I and uname -n of four hosts that are one
case "$1,$NAME" in -I,n1) echo 127.0.0.1 ;; -I,n2) echo 127.0.0.2 ;; -I,*) echo 127.0.0.3 ;; *) echo "$NAME" ;; esac
"""


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    for name, text in (("ssh", SSH), ("hostname", NAMES), ("uname", NAMES)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = tmp_path / "hosts"
    path.write_text("n1 slots=1\ndown slots=1\nlame slots=1\nn2 slots=1\n")
    return path


def around(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@pytest.mark.slow
def test_a_look_at_the_hosts_writes_both_lists_and_names_the_next_command(hostfile: Path) -> None:
    out = hostfile.parent / "out"
    asked = ("comm", "--hostfile", str(hostfile), "--static", "--out", str(out))
    refused = run_inside(*asked, "-v", **around(hostfile.parent))
    skipped = run_inside(*asked, "-v", "--skip-bad", **around(hostfile.parent))
    chosen_only = run_inside(*asked, "--exclude", "down", **around(hostfile.parent))

    assert (refused.returncode, skipped.returncode, chosen_only.returncode) == (1, 6, 0)
    assert "1 of 4 hosts cannot take part: down; --skip-bad tests the others" in refused.stdout
    assert f"$ python -m dsdoctor comm --hostfile {hostfile} --skip-bad" in refused.stdout
    assert "skipped 1 of 4 hosts: down" in skipped.stdout
    assert "Connection refused" not in skipped.stdout
    assert "down" not in chosen_only.stdout
    assert "OK" not in chosen_only.stdout
    assert (out / "good-hosts").read_text() == "n1 slots=1\nlame slots=1\nn2 slots=1\n"
    assert (out / "bad-hosts").read_text() == "down\n"


@pytest.mark.launch
def test_the_rest_is_tested_without_the_hosts_that_are_bad_before_or_in_the_test(hostfile: Path) -> None:
    argv = [sys.executable, "-m", "dsdoctor", "comm", "--hostfile", str(hostfile), "--skip-bad", "--quick", "--json"]
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}

    began = time.monotonic()
    done = subprocess.run(
        [*argv, "--backend", "gloo", "--deadline", "300", "--out", str(hostfile.parent / "out")],
        env={**clean, **around(hostfile.parent)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    whole = json.loads(done.stdout)

    assert done.returncode == 6, done.stderr
    # rank 0 is told at once that no rank comes from there; the others would give up after 180 s
    assert time.monotonic() - began < 150
    assert whole["report"]["world"] == 2
    assert list(whole["report"]["left_out"]) == ["down", "lame"]
    assert whole["report"]["verdict"].startswith("! 2 of 2 ranks reach each other and get the same results")
    assert "skipped 2 of 4 hosts: down,lame" in whole["report"]["verdict"]
    assert whole["report"]["left_out"]["lame"].endswith(
        "the command on lame ended with status 3: lame: quota exceeded)"
    )
    assert (hostfile.parent / "out/good-hosts").read_text() == "n1 slots=1\nn2 slots=1\n"
