"""The watch under real launchers, two ranks of gloo: without DeepSpeed, where rank 1 never comes to its fourth step or is late in
each, and in a script with DeepSpeed that asks for the watch itself.

The launchers of this machine run at the same time: most of that is waiting. Slurm runs in a rig of two nodes.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dsdoctor.cli.hang import judge_processes
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.hang.models import Incident
from dsdoctor.hang.outside import py_spy_program
from dsdoctor.hang.processes import wait_until_ended
from tests.comm import services
from tests.comm.conftest import need
from tests.comm.rig import Rig, missing

pytestmark = pytest.mark.launch

HERE = Path(__file__).parent
PLAIN, TRAINER = str(HERE / "plain.py"), str(HERE / "trainer.py")
OPTIONS = ("--hang-after", "4", "--on-hang", "stop")
OURS = ("-m", "dsdoctor.run", *OPTIONS)
VERDICT = re.compile(r"dsdoctor: ✗ (.*)  \[(hang-[a-z-]+)\]")
LATENESS = re.compile(r"dsdoctor: ! (.*)  \[(hang-[a-z-]+)\]")
LATE = "torchrun, and a rank that does not join"
LATE_AGAIN, LATE_WORDS = "a late rank", ("--slow", "1", "--seconds", "0.1", "--steps", "300")
IN_CODE = "a script that asks itself"
DEADLOCKED, LOADER_WAKES = "a deadlocked loader", "17"
"""torch's loader wakes every 5 s to look whether its workers live: three times in so many seconds."""
HAS_DEEPSPEED = bool(importlib.util.find_spec("deepspeed"))
HAS_TRAINER = bool(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"))


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


def torchrun(*rest: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), *rest]


def by_hand(*rest: str) -> list[str]:
    """As a launcher of one's own does: each rank with its variables. Ends as well as both ranks do."""
    ranks = 'RANK=0 LOCAL_RANK=0 "$@" & first=$!; RANK=1 LOCAL_RANK=1 "$@" & wait $first; status=$?; wait $! && exit $status'
    return ["env", "WORLD_SIZE=2", "sh", "-c", ranks, "-", sys.executable, *rest]


def accelerate(*rest: str) -> list[str]:
    one = ["--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no"]
    words = ["--dynamo_backend", "no", "--main_process_port", free_port(), *rest]
    return [sys.executable, "-m", "accelerate.commands.launch", *one, *words]


def mpirun(*rest: str) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, *rest]


def exported(*rest: str) -> list[str]:
    """The launching line is as it was, and the environment says it."""
    python = shlex.quote(sys.executable)
    return ["sh", "-c", f'eval "$({python} {shlex.join(OURS)} --export sh)" && exec {python} "$@"', "-", *rest]


def launches() -> dict[str, list[str]]:
    """The command of each launcher that is here."""
    found = {
        "before torchrun": [sys.executable, *OURS, *torchrun(PLAIN, "--on", "1")],
        "exported": exported(*torchrun(PLAIN, "--on", "1")),
        LATE: [sys.executable, *torchrun(*OURS, PLAIN, "--late", "1")],
    }
    if shutil.which("mpirun"):
        found["mpirun"] = mpirun(*OURS, PLAIN, "--on", "1")
    if importlib.util.find_spec("accelerate"):
        found["accelerate"] = accelerate(*OURS, PLAIN, "--on", "1")
    if HAS_TRAINER:
        found["Trainer"] = by_hand(*OURS, TRAINER, "--on", "1")
        found["Trainer's callback"] = by_hand(TRAINER, "--on", "1", "--callback")
    return found


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A launcher in a session of its own, ended with all that it started."""
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSDOCTOR")}
    env |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    channels = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    process = subprocess.Popen(
        command, cwd=folder, env={**env, "PYTHONPATH": paths}, start_new_session=True, **channels
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How each launch ended, and what it said; they run beside each other, those that take longest begin first."""
    commands = {
        DEADLOCKED: by_hand(
            *(
                "-m",
                "dsdoctor.run",
                "--hang-after",
                LOADER_WAKES,
                "--on-hang",
                "stop",
                str(HERE / "deadlocked_loader.py"),
            )
        ),
        LATE_AGAIN: by_hand("-m", "dsdoctor.run", "--hang-after", "6", PLAIN, *LATE_WORDS),
        IN_CODE: [sys.executable, str(HERE / "in_code.py")] if HAS_DEEPSPEED else [],
        **launches(),
    }
    folder = tmp_path_factory.mktemp("launches")
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(started(command, folder / str(number)))
            for number, (name, command) in enumerate(commands.items())
            if command
        }
        said = {name: process.communicate(timeout=300)[1] for name, process in running.items()}
        return {name: (process.returncode, said[name]) for name, process in running.items()}


def test_the_rank_that_does_not_come_is_named_under_every_launcher(ended: dict[str, tuple[int, str]]) -> None:
    for name, (status, said) in ended.items():
        if name in {LATE_AGAIN, IN_CODE, DEADLOCKED}:
            continue
        verdicts = VERDICT.findall(said)
        rule = "hang-not-started" if name == LATE else "hang-rank-behind"
        assert [rule for _, rule in verdicts] == [rule], f"{name}\n{said}"
        title = verdicts[0][0]
        assert title.startswith("rank 1 "), f"{name}: {title}"
        # it might have come: that is said first, and ends nothing; on a full machine a start may be late, too
        late = LATENESS.findall(said)[-1][0]
        assert re.match(r"rank 1 \(.*\) is \d+ s late: ", late), f"{name}: {late}"
        assert said.index(late) < said.index(title) < said.index("HangDetected")
        assert ("trainer.py" if "Trainer" in name else "plain.py") in title, f"{name}: {title}"
        assert status not in {0, None}, name
        assert "HangDetected" in said, name
        if name == "Trainer's callback":
            assert "rank 1: step 1" in said, said


def test_a_deadlocked_loader_is_told_and_stopped(ended: dict[str, tuple[int, str]]) -> None:
    """A rank that waits for it wakes for ever, and its worker lives."""
    status, said = ended[DEADLOCKED]

    ((title, rule),) = VERDICT.findall(said)
    assert rule == "hang-all-outside", said
    assert "waits for its data loader at deadlocked_loader.py:" in title
    assert "waits for a lock at deadlocked_loader.py:" in said
    assert "HangDetected" in said
    assert status not in {0, None}


def test_a_rank_that_is_late_again_and_again_is_named_once_and_at_the_end(ended: dict[str, tuple[int, str]]) -> None:
    status, said = ended[LATE_AGAIN]

    assert status == 0, said
    told = re.findall(r"dsdoctor: ! (rank 1 .*)  \[rank-late-again\]", said)
    assert len(told) == 1, said
    assert "sleeps at plain.py:" in told[0]
    assert "waited for rank 1 " in said
    assert VERDICT.findall(said) == []


def judged_running(launcher: int) -> tuple[Incident, Finding]:
    """What is said of the ranks below a launcher, once they stand where they will stay."""
    last, found = time.monotonic() + 120, None
    while time.monotonic() < last:
        made, verdict = judge_processes([launcher], LocalHost(), apart=1.0)
        found = verdict.findings[0] if verdict.findings else None
        if found and found.rule in {"hang-rank-behind", "hang-rank-outside"} and "plain.py" in found.title:
            return made, found
    raise AssertionError(f"nothing was named: {found}")


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs DeepSpeed")
def test_a_script_that_asks_itself_is_told_of_the_hangs_of_each_of_its_engines_and_of_nothing_else(
    ended: dict[str, tuple[int, str]],
) -> None:
    status, said = ended[IN_CODE]

    # in the order in which it happened
    # what stands still goes on once it is told, and so is late and no hang
    assert VERDICT.findall(said) == []
    lines = [line for line in said.splitlines() if LATENESS.match(line) or line.startswith("stage ")]
    seen = [LATENESS.sub(r"\2", line) for line in lines]
    assert status == 0, said
    assert [seen[0], *sorted(seen[1:3]), seen[3], *sorted(seen[4:])] == [
        "hang-rank-behind",
        "stage 0 ended on rank 0",
        "stage 0 ended on rank 1",
        "hang-rank-behind",
        "stage 3 ended on rank 0",
        "stage 3 ended on rank 1",
    ], said
    assert all("rank 1 " in line and "in_code.py:" in line for line in (lines[0], lines[3])), said
    assert "Traceback" not in said
    # the supervisor was there, and has cleaned up behind the last rank
    rings = [Path(path) for path in re.findall(r"^ring (.*)$", said, re.MULTILINE)]
    last = time.monotonic() + 30
    while any(path.parent.exists() for path in rings) and time.monotonic() < last:
        time.sleep(0.2)
    assert len(rings) == 4
    assert not any(path.parent.exists() for path in rings)


def test_running_ranks_are_named_by_their_launcher_s_number_and_end_with_it(tmp_path: Path) -> None:
    commands = (
        {"hang-rank-outside": [sys.executable, *torchrun(PLAIN, "--on", "1")]} if py_spy_program(LocalHost()) else {}
    )
    if shutil.which("mpirun"):
        # watched, so its own rings tell the numbers of the collectives, and nobody needs py-spy
        commands["hang-rank-behind"] = mpirun("-m", "dsdoctor.run", PLAIN, "--on", "1")
    for number, (rule, command) in enumerate(commands.items()):
        with started(command, tmp_path / str(number)) as process:
            made, found = judged_running(process.pid)
            process.terminate()
            process.wait(timeout=30)
            left = [view.pid for view in made.ranks if not wait_until_ended(view.pid, 10.0)]

        assert (found.rule, found.severity) == (rule, Severity.ERROR)
        assert found.title.startswith("rank 1 ")
        assert "sleeps at plain.py:" in found.title
        assert "rank 0 is blocked in " in found.title
        assert left == []


@pytest.mark.slurm
def test_srun_on_two_nodes(tmp_path: Path) -> None:
    need(missing())
    need(services.lacks("srun", "slurmctld", "slurmd", "munged", "munge"))
    with Rig(tmp_path / "rig") as rig, services.slurm(rig):
        each = ["srun", "--nodes", "2", "--ntasks-per-node", "1", sys.executable]
        where = {"MASTER_ADDR": rig[0].address, "MASTER_PORT": "29511"}
        done = rig[0].run([*each, *OURS, PLAIN, "--on", "1"], timeout=100, env=where, cwd=rig.folder)

    found = VERDICT.findall(done.stderr)
    assert [rule for _, rule in found] == ["hang-rank-behind"], done.stderr
    assert found[0][0].startswith("rank 1 (nodeb, ")
    # late first, then a hang; the other node does not tell it again, and ends its rank alike
    assert done.stderr.count("no progress for") == 2, done.stderr
    assert done.stderr.count("HangDetected: ") == 2
    assert done.returncode == 1
