"""What is seen before a rank is started: a machine with a real script for ssh, real sockets, and facts written out."""

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.comm.launch.start import host_orders, module_command, remote_command, variables_of
from dsdoctor.comm.preflight.checks import CHECKS
from dsdoctor.comm.preflight.facts import (
    MAX_SSH_HOSTS,
    MODULES,
    HostProbe,
    Network,
    PortListener,
    PreflightFacts,
    look_forwarded,
    look_preflight,
    parse_visit,
    question,
)
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import CHILD_SCRIPTS, Answer
from dsdoctor.hosts.hostfile import Slots, parse_hostfile
from dsdoctor.hosts.ssh import ssh_problem
from dsdoctor.rules import book
from tests.conftest import Disk

# the last argument is the command; here "n1" is this machine, "n2" greets, the others are as their names say
SSH = """#!/bin/sh
for last; do :; done
case "$*" in
*" n1 "*) sh -c "$last" ;;
*" n2 "*) echo "Welcome to n2"; sh -c "$last" ;;
*" locked "*) echo "locked: Permission denied (publickey)." >&2; exit 255 ;;
*" slow "*) exec sleep 60 ;;
esac
"""
PATH = "/usr/bin:/bin"


def judged(facts: PreflightFacts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


def rules(facts: PreflightFacts) -> list[str]:
    return [finding.rule for finding in judged(facts)]


def visit(host: str, *addresses: str, prefix: int = 24, **changes: object) -> HostProbe:
    networks = tuple(Network(name=f"if{n}", address=address, prefix=prefix) for n, address in enumerate(addresses))
    healthy = HostProbe(host=host, status=0, answered=True, hostname=host, addresses=addresses, networks=networks)
    return replace(healthy, python=True, folder=True, modules=MODULES, **changes)  # type: ignore[arg-type]


def facts(*visits: HostProbe, **changes: object) -> PreflightFacts:
    hosts = parse_hostfile("".join(f"{visit.host} slots=1\n" for visit in visits))
    healthy = PreflightFacts(python="/p", folder="/job", port=29500, hostfile="/job/hosts", hosts=hosts, visits=visits)
    return replace(healthy, **{"ssh": "/usr/bin/ssh", "pdsh": "/usr/bin/pdsh", "pdsh_ways": ("ssh",), **changes})  # type: ignore[arg-type]


HEALTHY = facts(visit("n1", "10.0.0.1"), visit("n2", "10.0.0.2"))


def test_every_host_is_asked_and_every_ill_is_named(disk: Disk) -> None:
    files = {
        "/usr/bin/ssh": SSH,
        "/job/hosts": "n1 slots=1\nn2 slots=1\nlocked slots=1\nn3 slots = 1\n",
        "/home/.deepspeed_env": "GLOO_SOCKET_IFNAME=eth0\n",
        "/job/.deepspeed_env": "# ours\n",
    }
    host = disk(files, PATH=PATH, HOME="/home", GLOO_SOCKET_IFNAME="eth0", TORCH_FR_BUFFER_SIZE="9", NCCL_DEBUG="INFO")

    seen = look_preflight(host, hostfile="hosts", python=sys.executable, folder="/job")

    n1, n2, locked = seen.visits
    assert (n1.answered, n1.noise, n1.python, n1.folder, n1.hostname) == (True, "", True, False, socket.gethostname())
    assert (n2.noise, locked.status, locked.answered) == ("Welcome to n2", 255, False)
    assert seen.set_here == ("GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "TORCH_FR_BUFFER_SIZE")
    by_rule = {finding.rule: finding for finding in judged(seen)}
    assert {"hostfile-line-wrong", "ssh-fails", "login-scripts-print", "pdsh-missing", "host-lacks-folder"} <= set(
        by_rule
    )
    assert by_rule["deepspeed-env-malformed"].title == "/job/.deepspeed_env, line 1: a comment; DeepSpeed stops here"
    assert by_rule["variable-not-forwarded"].title.startswith(
        "DeepSpeed's launcher does not forward TORCH_FR_BUFFER_SIZE, only MLFLOW*"
    )


def test_a_host_that_does_not_answer_holds_nobody_up(disk: Disk) -> None:
    host = disk({"/usr/bin/ssh": SSH, "/job/hosts": "slow slots=1\nlocked slots=1\n"}, PATH=PATH)
    begin = time.monotonic()

    seen = look_preflight(host, hostfile="hosts", python=sys.executable, folder="/job", limit=0.5)

    assert time.monotonic() - begin < 40
    assert [ssh_problem(visit.host, visit.status, visit.stderr).what for visit in seen.visits] == [
        "it connects, but does not answer in time",
        "it accepts none of this user's keys",
    ]


def test_a_missing_hostfile_gives_no_hosts_and_no_hostfile_no_finding(disk: Disk) -> None:
    named = look_preflight(disk({}), hostfile="hosts", python="/p", folder="/job")
    unnamed = look_preflight(disk({}), hostfile=None, python="/p", folder="/job", port=1)

    assert (named.hosts, rules(unnamed)) == (None, [])


N1, N2 = visit("n1", "172.17.0.1", "10.0.0.1"), visit("n2", "10.0.0.2")


@pytest.mark.parametrize(
    ("problem", "rule", "said"),
    [
        (facts(N1, N2), "master-address-elsewhere", "10.0.0.1 is in a network that all hosts share"),
        (
            facts(visit("n1", "172.17.0.1"), visit("n2", "172.17.0.1")),
            "master-address-elsewhere",
            "n2 has the same address",
        ),
        (
            facts(visit("n1", "10.0.0.1"), replace(N2, hostname="n1", addresses=("10.0.0.1",))),
            "host-named-twice",
            "n1 and n2 in /job/hosts are the same machine",
        ),
        (facts(visit("n1", "10.0.0.1"), replace(N2, python=False)), "host-lacks-python", "no /p on n2"),
        (
            facts(visit("n1", "10.0.0.1"), replace(N2, modules=("torch",))),
            "host-lacks-modules",
            "/p cannot import deepspeed, dsdoctor",
        ),
        (replace(HEALTHY, pdsh=None), "pdsh-missing", "pdsh is not on PATH"),
        (replace(HEALTHY, pdsh_ways=("rsh",)), "pdsh-missing", "supports rsh; DeepSpeed needs ssh"),
        (replace(HEALTHY, ssh=None), "ssh-missing", "ssh is not on PATH"),
        (
            replace(HEALTHY, set_here=("LD_LIBRARY_PATH",)),
            "variable-not-forwarded",
            "does not forward LD_LIBRARY_PATH,",
        ),
        (
            replace(HEALTHY, set_here=("NCCL_DEBUG",), accelerator="cpu"),
            "variable-not-forwarded",
            "does not forward NCCL_DEBUG,",
        ),
        (
            facts(
                visit("n1", "10.0.0.1", listener=PortListener(host="n1", said="LISTEN", pid=7, command="python")), N2
            ),
            "master-port-in-use",
            "port 29500 on n1, the first host, is taken by process 7 (python)",
        ),
    ],
)
def test_a_problem_before_the_start_has_its_name(problem: PreflightFacts, rule: str, said: str) -> None:
    found = [finding for finding in judged(problem) if finding.rule == rule]

    assert len(found) == 1
    assert said in found[0].title
    assert found[0].fix is not None


def test_healthy_facts_have_no_finding() -> None:
    assert judged(HEALTHY) == []
    assert rules(facts(visit("n1", "10.0.0.1"), visit("n2", "10.1.0.2"))) == []  # routed networks are no problem


def test_each_check_is_named_after_its_rule_and_explains_itself() -> None:
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert all(len((check.__doc__ or "").split("\n\n")[0]) > 20 for check in CHECKS)


@pytest.mark.slow
def test_a_port_that_accepts_and_stays_silent_is_no_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        argv = ["ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", "-p", port, "127.0.0.1", "true"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    found = ssh_problem("n1", done.returncode, done.stderr)
    assert "accepts connections, but no sshd answers" in found.what, done.stderr
    assert "firewall" not in repr(found)


@pytest.mark.parametrize(
    "problem",
    [problem for problem in book.tables("hosts", "ssh") if "pattern" in problem],
    ids=lambda problem: problem["pattern"][:20],
)
def test_an_ill_of_ssh_is_told_by_its_sample_and_names_the_host(problem: book.Table) -> None:
    found = ssh_problem("n1", 255, problem["sample"])

    assert found.what == problem["what"]
    assert not any("HOST" in typed.line for typed in found.steps)


def test_what_is_printed_for_another_host_is_read_by_two_shells_and_stays_what_it_was(tmp_path: Path) -> None:
    folder = f"{tmp_path}/a b'; touch P; $(touch Q) #"
    (finding,) = judged(facts(replace(visit("n1", "10.0.0.1"), folder=False), folder=folder))
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    (tmp_path / "ssh").chmod(0o755)
    assert finding.fix is not None
    subprocess.run(["sh", "-c", finding.fix.commands[0]], cwd=tmp_path, env={"PATH": f"{tmp_path}:{PATH}"}, check=True)

    assert finding.rule == "host-lacks-folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b'; touch P; $(touch Q) #", "ssh"]


def test_the_line_that_forwards_a_variable_writes_it(tmp_path: Path) -> None:
    several = facts(*(visit(name, f"10.0.0.{name[1]}") for name in ("n1", "n2")), set_here=("GLOO_X", "A;touch P"))
    (finding,) = judged(several)
    assert finding.fix is not None
    env = {"GLOO_X": "it's a", "GLOO_XY": "no", "PATH": PATH}
    subprocess.run(["sh", "-c", finding.fix.commands[0]], cwd=tmp_path, env=env, check=True)

    assert (tmp_path / ".deepspeed_env").read_text() == "GLOO_X=it's a\n"
    assert finding.fix.commands[1] == "env | grep ^VARIABLE= >> .deepspeed_env"


def test_ranks_over_ssh_carry_who_they_are_and_no_secret(disk: Disk) -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_TOKEN": "s3cret", "PYTHONPATH": "/mine"}
    host = disk({"/job/.deepspeed_env": "A=/it\nB=it's\nHF_TOKEN=s3cret\n"}, HOME="/home", **env)
    hosts = (Slots(name="n1", slots=1, line=1), Slots(name="n2", slots=2, line=2))

    orders = host_orders(hosts, master="10.0.0.1", port=4711, token="t", seconds=60.0)
    variables = look_forwarded(host, "/job")
    ranks = [variables_of(order, rank) for order in orders.values() for rank in order.ranks]

    assert [(name, order.first, order.count) for name, order in orders.items()] == [("n1", 0, 1), ("n2", 1, 2)]
    assert ranks[2].items() >= {"RANK": "2", "LOCAL_RANK": "1", "DSDOCTOR_COMM_HOSTS": "n1*1,n2*2"}.items()
    assert variables == {"A": "/it", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/mine"}
    assert "s3cret" not in str(variables)


def test_a_host_that_answers_late_is_told_and_not_called_broken() -> None:
    hosts = (visit("n1", "10.0.0.1"), replace(visit("n2", "10.0.0.2"), seconds=12.4))
    (finding,) = judged(facts(*hosts))

    assert (finding.rule, finding.severity) == ("login-slow", Severity.WARNING)
    assert finding.title == "ssh to n2 took up to 12 s"


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "csh", "tcsh", "fish"])
def test_a_command_is_the_same_for_every_login_shell(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    word = "it's $HOME `id` \\n !x \"q\" \\' {a,b} %h\n*"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def said(command: str) -> str:
        return subprocess.run([path, "-c", command], env=environment, capture_output=True, text=True, check=True).stdout

    assert said(remote_command(("printenv", "WORD"), str(tmp_path), {"WORD": word})) == f"{word}\n"
    assert said(remote_command(("pwd",), str(tmp_path / "absent"), {})) == f"{tmp_path}\n"
    answer = Answer(returncode=0, stdout=said(question(sys.executable, f"{tmp_path}", 29500, None)))
    asked = parse_visit("n1", answer)
    assert (asked.answered, asked.folder, asked.python) == (True, True, True)


def remote(tmp_path: Path, line: str) -> "subprocess.Popen[bytes]":
    command = remote_command(("sh", "-c", line), str(tmp_path), {"WORD": "it's"})
    return subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_remote_rank_has_its_folder_variables_and_status(tmp_path: Path) -> None:
    process = remote(tmp_path, 'echo "$WORD $PWD"; exit 7')

    assert process.stdout is not None
    assert process.stdout.read().decode() == f"it's {tmp_path}\n"
    assert process.wait(5) == 7
    process.communicate()


def test_a_wrong_line_in_a_hostfile_does_not_reach_ssh(disk: Disk) -> None:
    host = disk(
        {"/usr/bin/ssh": "#!/bin/sh\necho reached >&2\n", "/job/hosts": "-oProxyCommand=x slots=1\n"}, PATH=PATH
    )

    seen = look_preflight(host, hostfile="hosts", python="/p", folder="/job")

    assert seen.visits == ()
    assert [finding.severity for finding in judged(seen)] == [Severity.ERROR]


@pytest.mark.parametrize("count", [3, MAX_SSH_HOSTS + 1])
def test_more_hosts_than_one_can_start_ranks_on_are_handed_to_the_scheduler(disk: Disk, count: int) -> None:
    lines = "".join(f"gpu{number:04d} slots=8\n" for number in range(count))
    host = disk({"/job/hosts": lines, "/bin/ssh": "#!/bin/sh\nexit 1\n"}, PATH="/bin")

    found = look_preflight(host, hostfile="hosts", python="/p", folder="/job")
    handed = [finding for finding in judged(found) if finding.rule == "too-many-hosts"]

    assert (len(found.visits), len(handed)) == ((3, 0) if count == 3 else (0, 1))
    if handed and handed[0].fix:
        commands = handed[0].fix.commands
        assert commands[0].startswith(f"srun --nodes={count} --ntasks-per-node=8 --nodelist='gpu[0000-{count - 1}]'")
        assert commands[1].startswith(f"mpirun -np {8 * count} --hostfile /job/hosts /p -m dsdoctor.comm --json")
        assert commands[-1] == "python -m dsdoctor comm --read comm.json"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with modules that somebody put there under names that are imported."""
    for name in ("runpy", "json", "site", "sitecustomize", "usercustomize", "argparse", "importlib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return tmp_path


@pytest.mark.slow
def test_no_module_of_the_current_folder_is_run_in_a_process_that_is_started(planted: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "-m", "json.tool", "/dev/null"], cwd=planted, capture_output=True, check=False
    )
    assert (planted / "ran").exists(), f"else nothing was planted: {plain.stderr!r}"
    (planted / "ran").unlink()
    (planted / "x.json").write_text("[1]")
    local = (sys.executable, str(CHILD_SCRIPTS / "run_module.py"), "json.tool", "x.json")
    for argv in (local, module_command(sys.executable, "json.tool", "x.json", folder=str(planted))):
        done = subprocess.run(argv, cwd=planted, capture_output=True, text=True, check=False)
        assert (done.stdout.split(), done.stderr) == (["[", "1", "]"], "")
    asking = question(sys.executable, str(planted), 29500, None)
    asked = subprocess.run(["sh", "-c", asking], capture_output=True, text=True, check=True)

    assert "deepspeed" in asked.stdout, "what lies there is seen"
    assert not (planted / "ran").exists()
