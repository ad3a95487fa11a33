"""`dsdoctor install --hostfile` over a real script for ssh that runs the command here: nodes are folders with a real interpreter in
them, whose dsdoctor and pip are small programs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsdoctor.core.finding import Step
from dsdoctor.hosts.install import NodeMessage
from dsdoctor.ui.terminal import finding_lines
from tests.builder.test_wheel import INFO, METADATA, NAME, contents, wheel
from tests.cli.runner import run
from tests.each import each

# the last argument is the command, the one before it the host
SSH = """#!/bin/sh
for last; do host=$command; command=$last; done
case $host in
  down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
  stranger) echo "Host key verification failed." >&2; exit 255 ;;
  silent) exec sleep 60 ;;
esac
echo "Welcome to $host"
echo "$*" >>"$NODES/asked"
export NODE="$NODES/$host" TMPDIR="$NODES/$host/tmp" PATH="$NODES/$host/bin:/usr/bin:/bin"
[ $host = flips ] || exec sh -c "$command"
"$NODES/flip" | sh -c "$command"
"""
FLIP = """#!{python}
import sys
while data := sys.stdin.buffer.read1(1 << 16):
    sys.stdout.buffer.write(data.replace(b"raise SystemExit('executed')", b"raise SystemExit('Executed')"))
    sys.stdout.buffer.flush()
"""
DSDOCTOR = """
import json, os, sys, time
place = os.environ["NODE"]
with open(place + "/verified", "w") as file:
    file.write(os.path.abspath(sys.argv[2]))
if os.path.exists(place + "/hangs"):
    time.sleep(60)
wrong = os.path.exists(place + "/refuses")
fix = {"text": "install it", "commands": ["python -m pip install torch"]}
finding = {"rule": "torch-missing", "severity": "error", "title": "no torch beside " + os.path.abspath(sys.argv[2]), "fix": fix}
print(json.dumps({"schema": "dsdoctor/1", "findings": [finding] if wrong else [], "later": 1}))
sys.exit(wrong)
"""
PIP = """
import os, sys, time, zipfile
place, site = os.environ["NODE"], os.path.dirname(os.path.dirname(__file__))
if os.path.exists(place + "/pip-fails"):
    sys.exit("ERROR: No space left on device")
if os.path.exists(place + "/pip-lies"):
    sys.exit(0)
os.mkdir(site + "/pip-is-at-work")  # a second one fails here
time.sleep(0.2)
while os.path.exists(place + "/pip-waits"):
    time.sleep(0.05)
zipfile.ZipFile(sys.argv[-1]).extractall(site)
os.rmdir(site + "/pip-is-at-work")
"""

FILES = contents(
    b"no library",
    **{
        "deepspeed/__init__.py": b"raise SystemExit('executed')\n",
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8+cu13.0.torch2.14\n",
    },
)
Node = Callable[..., Path]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux machines")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without pip."""
    folder = tmp_path_factory.mktemp("bare") / "node"
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """The folder of the nodes, with their ssh and a wheel beside it."""
    for name, text in {"bin/ssh": SSH, "nodes/flip": FLIP.format(python=sys.executable)}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    path = wheel(tmp_path, FILES)
    path.with_name(f"{NAME}.json").write_text("{}")
    return tmp_path / "nodes"


@pytest.fixture
def node(nodes: Path, bare: Path) -> Node:
    """Makes a node; ``how`` are the things that are wrong with it."""

    def make(name: str, *how: str) -> Path:
        place = nodes / name
        subprocess.run(["cp", "-a", str(bare), str(place)], check=True)
        (place / "tmp").mkdir()
        for module, text in {"dsdoctor": DSDOCTOR, "pip": PIP}.items():
            if f"no-{module}" not in how:
                (site(place) / module).mkdir()
                (site(place) / module / "__init__.py").touch()
                (site(place) / module / "__main__.py").write_text(text)
        if "dsdoctor-on-path" in how:
            (place / "bin" / "dsdoctor").write_text(f"#!{place}/bin/python\n{DSDOCTOR}")
            (place / "bin" / "dsdoctor").chmod(0o755)
        for mark in how:
            (place / mark).touch()
        return place

    return make


def site(place: Path) -> Path:
    return next(place.glob("lib/python*/site-packages"))


def has_it(place: Path) -> bool:
    return (site(place) / "deepspeed" / "__init__.py").exists()


def arguments(nodes: Path, hosts: str, *more: str) -> list[str]:
    (nodes / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
    return ["install", str(nodes.parent / NAME), "--hostfile", str(nodes / "hosts"), "--python", "python", *more]


def around(nodes: Path) -> dict[str, str]:
    """The variables that lead to these nodes."""
    return {"PATH": f"{nodes.parent}/bin:{os.environ['PATH']}", "NODES": str(nodes)}


def install(nodes: Path, hosts: str, *more: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """The exit status, the nodes by name, and the whole document."""
    done = run(*arguments(nodes, hosts, *more), "--json", **around(nodes))
    document = json.loads(done.stdout)
    return done.returncode, {node["host"]: node for node in document["nodes"]}, document


def states(told: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {host: node["state"] for host, node in told.items()}


def rules(told: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    return {host: [finding["rule"] for finding in node["findings"]] for host, node in told.items() if node["findings"]}


@pytest.mark.slow
@each("mode, is_used", [(0o700, True), (0o1777, True), (0o777, False), (0o770, False)])
def test_a_wheel_is_copied_where_nobody_on_the_node_can_exchange_it(
    mode: int, is_used: bool, nodes: Path, node: Node
) -> None:
    name = f"mode-{mode:o}"
    place = node(name)
    (place / "tmp").chmod(mode)

    status, told, _ = install(nodes, name, "--dry-run")

    assert (status, states(told)) == (0, {name: "verified"}), told
    verified = Path((place / "verified").read_text())
    assert (place / "tmp" in verified.parents) is is_used, verified
    assert not verified.parent.exists()


def left(nodes: Path) -> list[str]:
    """What lies in the temporary folders of the nodes."""
    return [str(path) for path in nodes.glob("*/tmp/*")]


def wait_for(true: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_a_wheel_is_on_every_node_and_is_left_alone_by_a_second_time(nodes: Path, node: Node) -> None:
    places = [node("n1"), node("n2")]
    status, told, document = install(nodes, "n1 n2", "--ssh-option", "ProxyJump=gate", "-p", "2222")
    again = install(nodes, "n1 n2")
    shown = run(*arguments(nodes, "n1 n2"), **around(nodes)).stdout.splitlines()

    assert (status, states(told), document["findings"]) == (0, {"n1": "installed", "n2": "installed"}, [])
    assert all(map(has_it, places))
    assert left(nodes) == []
    assert told["n1"]["before"] is None
    assert told["n1"]["now"]["version"] == "0.19.8+cu13.0.torch2.14"
    asked = (nodes / "asked").read_text()
    assert "-T -o BatchMode=yes -p 2222 -o ProxyJump=gate -o ConnectTimeout=5" in asked
    assert (again[0], again[1]["n2"]["already"]) == (0, True)
    assert shown[0].startswith("✓ n1  it already exists")
    assert shown[-1] == f"✓ {NAME} is on all 2 nodes"


@pytest.mark.slow
def test_a_node_that_fails_is_named_and_stops_no_other(nodes: Path, node: Node) -> None:
    problems = ("refuses", "no-dsdoctor", "pip-fails", "no-pip", "pip-lies")
    places = [node("n1"), *(node(f"n{number}", problem) for number, problem in enumerate(problems, start=2))]
    (nodes / "n7").mkdir()
    hosts = "n1 n2 n3 n4 n5 n6 n7 down stranger"
    status, told, document = install(nodes, hosts, "--parallel", "4")

    assert status == 4
    assert (
        " ".join(states(told).values())
        == "installed refused failed failed failed failed failed unreachable unreachable"
    )
    assert rules(told) == {
        "n2": ["torch-missing"],
        "n3": ["host-lacks-modules"],
        "n4": ["node-not-installed"],
        "n5": ["node-lacks-pip"],
        "n6": ["node-has-another"],
        "n7": ["host-lacks-python"],
        "down": ["ssh-fails"],
        "stranger": ["ssh-fails"],
    }
    titles = {finding["title"] for finding in document["findings"]}
    assert f"n2: no torch beside {NAME}" in titles
    assert "n4: installation failed: ERROR: No space left on device" in titles
    assert "stranger: ssh failed: its host key is unknown here, and a launcher" in "".join(titles)
    assert told["n4"]["known"]
    assert list(map(has_it, places)) == [True, *[False] * 5]
    assert left(nodes) == []


@pytest.mark.slow
def test_a_dsdoctor_of_another_environment_on_path_does_as_well(nodes: Path, node: Node) -> None:
    place = node("n1", "no-dsdoctor", "dsdoctor-on-path")

    assert install(nodes, "n1")[0] == 0
    assert has_it(place)


def test_a_message_of_a_node_makes_no_step() -> None:
    fix = {"text": "t", "commands": ["touch P; #"], "steps": msgspec.to_builtins((Step(template="touch P"),))}
    finding = {"rule": "r", "severity": "error", "title": "t", "evidence": [" $ touch P"], "fix": fix}
    message = msgspec.convert({"say": "verified", "findings": [finding]}, type=NodeMessage)
    lines = list(finding_lines(told.ours() for told in message.findings))

    assert lines[1:] == ["    it says: $ touch P", "    it advises: touch P; #", "    Fix: t"]


@pytest.mark.slow
def test_commands_of_a_node_are_told_and_never_offered_to_be_pasted(nodes: Path, node: Node) -> None:
    fix = {
        "text": "install it\n      $ touch P",
        "commands": ["touch P; #", "pip install x\n      $ touch P"],
        "steps": msgspec.to_builtins((Step(template="touch P; #"),)),
    }
    finding = {"rule": "r", "severity": "error", "title": "bad\n$ touch P", "evidence": ["  $ touch P"], "fix": fix}
    said = f"import json, sys\nprint(json.dumps({{'findings': [{finding!r}]}}))\nsys.exit(1)\n"
    (site(node("n1")) / "dsdoctor" / "__main__.py").write_text(said)
    shown = run(*arguments(nodes, "n1", "--dry-run"), **around(nodes)).stdout
    document = install(nodes, "n1", "--dry-run")[2]

    assert "    it advises: touch P; #" in shown.splitlines()
    assert "    it says: $ touch P" in shown.splitlines()
    assert not [line for line in shown.splitlines() if line.lstrip().startswith("$")]
    assert [(found["fix"]["steps"], found["fix"]["commands"]) for found in document["findings"]] == [([], [])]


@pytest.mark.slow
def test_a_copy_that_was_changed_on_the_way_is_not_even_verified(nodes: Path, node: Node) -> None:
    place = node("flips", "hangs")
    node("n1")
    # not compressed, so that the one byte stands in it as it is
    with zipfile.ZipFile(nodes.parent / NAME, "w", zipfile.ZIP_STORED) as file:
        for name, data in FILES.items():
            file.writestr(name, data)
    status, told, _ = install(nodes, "n1 flips")

    assert (status, states(told)) == (4, {"n1": "installed", "flips": "failed"})
    assert rules(told) == {"flips": ["wheel-copy-differs"]}
    assert told["flips"]["step"] == "copy"
    assert not has_it(place)
    assert left(nodes) == []


@pytest.mark.slow
def test_a_dry_run_installs_nothing_and_all_or_nothing_waits_for_every_verdict(nodes: Path, node: Node) -> None:
    places = [node("n1"), node("n2", "refuses"), node("n3")]
    dry = install(nodes, "n1 n3", "--dry-run")
    refused = install(nodes, "n1 n2", "--all-or-nothing", "--parallel", "1")

    assert (dry[0], states(dry[1])) == (0, {"n1": "verified", "n3": "verified"})
    assert (refused[0], states(refused[1])) == (1, {"n1": "verified", "n2": "refused"})
    assert not any(map(has_it, places))
    assert install(nodes, "n1 n3", "--all-or-nothing", "--parallel", "1")[0] == 0
    assert [has_it(place) for place in places] == [True, False, True]
    assert left(nodes) == []


@pytest.mark.slow
def test_two_names_of_one_environment_never_have_two_pips_in_it(nodes: Path, node: Node) -> None:
    node("n1")
    (nodes / "other").symlink_to("n1")
    status, told, _ = install(nodes, "n1 other")

    assert (status, states(told)) == (0, {"n1": "installed", "other": "installed"})
    assert sorted(node["already"] for node in told.values()) == [False, True]


@pytest.mark.launch
def test_a_step_that_takes_too_long_is_broken_off(nodes: Path, node: Node) -> None:
    node("n1", "hangs")
    status, told, _ = install(nodes, "n1 silent", "--timeout", "5")

    assert (status, rules(told)) == (4, {"n1": ["node-not-verified"], "silent": ["ssh-fails"]})
    assert left(nodes) == []


Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def started(nodes: Path) -> Iterator[Started]:
    """Starts an installation as a process of its own, and gives it when its stderr has a line."""
    running = []

    def start(hosts: str, line: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", "dsdoctor", *arguments(nodes, hosts)]
        channels: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(argv, env={**os.environ, **around(nodes)}, **channels))
        assert running[-1].stderr
        assert any(line in told for told in running[-1].stderr)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.launch)])
def test_an_installation_that_is_interrupted_leaves_nothing_on_a_node(
    number: int, nodes: Path, node: Node, started: Started
) -> None:
    place = node("n1", "hangs")
    process = started("n1", "n1: verify")
    wait_for(lambda: len(left(nodes)) > 0)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    wait_for(lambda: not left(nodes))

    assert not has_it(place)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "✗ n1  failed at the step verify; it has no DeepSpeed" in out
        assert "n1: the installation was interrupted at the step verify; nothing was installed  [node-cut-off]" in out


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_pip_that_has_begun_comes_to_its_end_whatever_happens_to_dsdoctor(
    number: int, nodes: Path, node: Node, started: Started
) -> None:
    place = node("n1", "pip-waits")
    node("n2", "hangs")
    process = started("n1 n2", "n1: install")
    wait_for((site(place) / "pip-is-at-work").exists)
    process.send_signal(number)
    time.sleep(0.5)
    (place / "pip-waits").unlink()
    out, _ = process.communicate(timeout=30)
    wait_for(lambda: not left(nodes))

    assert has_it(place)
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert "✓ n1  installed; before: no DeepSpeed" in out
        assert "✗ n2  failed at the step verify; it has no DeepSpeed" in out


def processes(command: bytes, nodes: Path) -> Iterator[int]:
    """The interpreters of the nodes that run a command."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={nodes}/".encode() in (place / "environ").read_bytes():
                said = (place / "cmdline").read_bytes()
                if command in said and not said.startswith(b"sh\0"):
                    yield int(place.name)


@pytest.mark.launch
def test_a_node_that_is_killed_leaves_no_folder(nodes: Path, node: Node, started: Started) -> None:
    node("n1", "hangs")
    process = started("n1", "n1: verify")
    wait_for(lambda: len(left(nodes)) > 0)
    # the younger one cleans up behind the other
    os.kill(min(processes(b"sys.stdin.buffer.read", nodes)), signal.SIGKILL)
    out, _ = process.communicate(timeout=30)
    wait_for(lambda: not left(nodes))

    assert process.returncode == 4
    assert "n1: the connection ended at the step verify; nothing was installed  [node-cut-off]" in out


@pytest.mark.parametrize(
    ("hosts", "more", "said"),
    [
        ("-oProxyCommand=evil", [], "ssh reads it as an option"),
        ("n1 n1", [], "n1 is already on line 1"),
        ("", [], "no host in it"),
        ("n1", ["--ssh-option", "-F/x"], "--ssh-option '-F/x' is not an ssh option"),
        ("n1", ["--timeout", "nan"], "not a time limit"),
        ("n1", ["--hostfile", "/nowhere"], "cannot be read"),
        ("n1", ["--ops", "cpu_adam"], "installs a finished wheel on the nodes, and a build option was given"),
        ("n1", ["--index-url", "."], "installs a finished wheel on the nodes, and --index-url was given"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_node_is_asked(
    hosts: str, more: list[str], said: str, nodes: Path
) -> None:
    done = run(*arguments(nodes, hosts, *more), **around(nodes))

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (nodes / "asked").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("evil.pth", b"import evil", "do not belong to DeepSpeed: evil.pth"),
        (
            f"{INFO}/entry_points.txt",
            b"[torch.backends]\nx=deepspeed.x:y",
            "entry point [torch.backends] x = deepspeed.x:y",
        ),
        (f"{INFO}/METADATA", b"Name: torch\nVersion: 99\n", "METADATA names the package 'torch'"),
        (
            f"{INFO}/METADATA",
            METADATA.replace(b"torch\n\n", b"x@https://u:p@evil/x\n\n"),
            "fetch: x from https://evil/x",
        ),
    ],
)
def test_a_wheel_with_what_is_not_deepspeeds_goes_nowhere(name: str, content: bytes, said: str, nodes: Path) -> None:
    files = {name: data for name, data in FILES.items() if name != f"{INFO}/RECORD"}
    wheel(nodes.parent, contents(b"no library", **{**files, name: content}))
    done = run(*arguments(nodes, "n1"), **around(nodes))

    assert done.returncode == 2
    assert said in done.stderr
    assert not (nodes / "asked").exists()


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--hostfile", "hosts"], "--hostfile needs a wheel", "dsdoctor install dist/WHEEL --hostfile FILE"),
        (["--dry-run"], "only --hostfile installs on nodes, and --dry-run was given", "add --hostfile FILE"),
        (["--parallel", "4"], "only --hostfile installs on nodes, and --parallel was given", "add --hostfile FILE"),
        (["dist/x.whl"], "WHEEL needs --hostfile", "dsdoctor install --index-url dist"),
    ],
)
def test_a_wheel_a_hostfile_and_its_options_belong_together(words: list[str], said: str, hint: str) -> None:
    done = run("install", *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert hint in done.stderr


def test_a_wheel_that_is_not_whole_goes_nowhere(nodes: Path) -> None:
    path = nodes.parent / NAME
    path.with_name(f"{NAME}.json").write_text(json.dumps({"sha256": "0" * 64}))
    done = run(*arguments(nodes, "n1"), **around(nodes))

    assert done.returncode == 2
    assert "differ from its RECORD" in done.stderr
