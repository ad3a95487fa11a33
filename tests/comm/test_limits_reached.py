"""Which limit ended a rank: only one whose count rose, or that is reached, and whose effect the ending is."""

import random

from dsdoctor.comm.control.supervisor import Lost, control_lost
from dsdoctor.comm.local.limits import Limits, what_else, why_ended
from dsdoctor.core.cgroups import Cgroups
from tests.comm.made_claims import rank as made_rank
from tests.each import each

KILLED, NO_THREAD = "killed by SIGKILL", "RuntimeError: can't start new thread"
AGAIN = "RuntimeError: Resource temporarily unavailable"
BQ = {"memory": "/bq", "pids": "/bq", "cpu": "/"}


def why(before: Cgroups, now: Cgroups, ended: str | None = None, error: str | None = None) -> str:
    return why_ended(Limits(groups=before), Limits(groups=now), ended=ended, error=error)


@each(
    "before, now, ended, error, said",
    [
        (
            Cgroups(memory=420 << 20, kills=3),
            Cgroups(memory=420 << 20, kills=4),
            KILLED,
            None,
            "the out-of-memory killer of its memory cgroup, whose limit is 420 MiB",
        ),
        (
            Cgroups(most_tasks=8, tasks=6, refused=1),
            Cgroups(most_tasks=8, tasks=7, refused=4),
            None,
            AGAIN,
            "its pids cgroup allows 8 processes and threads and has 7; it refused 3 meanwhile",
        ),
        (
            Cgroups(),
            Cgroups(paths=BQ, unseen=("pids",)),
            None,
            NO_THREAD,
            "no process or thread could be started, and no ulimit -u is reached: most likely pids.max of its cgroup /bq,",
        ),
    ],
)
def test_the_limit_that_was_reached_is_named(
    before: Cgroups, now: Cgroups, ended: str | None, error: str | None, said: str
) -> None:
    assert why(before, now, ended, error).startswith(said)


def test_a_limit_of_the_user_is_named_where_it_is_reached() -> None:
    now = Limits(groups=Cgroups(), most_tasks=100, tasks=99)

    assert why_ended(now, now, ended=None, error=NO_THREAD).startswith("its user may have 100 processes and threads")
    assert why_ended(now, Limits(groups=Cgroups(), most_tasks=100, tasks=20), ended=None, error=NO_THREAD) == ""


@each(
    "error, told",
    [
        (AGAIN, False),
        ("NCCL WARN Call to connect to 10.0.0.2<4000> failed: Resource temporarily unavailable", False),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", False),
        ("    sock.recv(1)\nBlockingIOError: [Errno 11] Resource temporarily unavailable", False),
        ("terminate called\nthread constructor failed: Resource temporarily unavailable", True),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", True),
        ("bash: fork: retry: Resource temporarily unavailable", True),
        (
            "    pid = os.fork()\n          ^^^^^^^^^\nBlockingIOError: [Errno 11] Resource temporarily unavailable",
            True,
        ),
    ],
)
def test_a_socket_that_is_not_ready_is_no_limit_of_tasks(error: str, told: bool) -> None:
    near = Cgroups(most_tasks=8, tasks=8, refused=1)

    assert bool(why(near, near, None, error)) is told
    assert bool(why(Cgroups(), Cgroups(paths=BQ, unseen=("pids",)), None, error)) is told


@each(
    "own, unseen, said",
    [
        (0, (), "possibly another one"),
        (0, ("memory",), "; its memory cgroup /bq is not mounted here, so its limit cannot be read"),
        (1, (), ""),
    ],
)
def test_a_kill_somewhere_on_the_host_is_told_as_possible_and_never_as_the_cause(
    own: int, unseen: tuple[str, ...], said: str
) -> None:
    before = Limits(groups=Cgroups(memory=1 << 30, host_kills=5))
    now = Limits(groups=Cgroups(memory=1 << 30, kills=own, host_kills=6, paths=BQ, unseen=unseen))

    assert bool(why_ended(before, now, ended=KILLED, error=None)) is bool(own)
    assert what_else(before, now, ended=KILLED).endswith(said)
    assert bool(what_else(before, now, ended=KILLED)) is bool(said)
    assert what_else(before, now, ended="killed by SIGTERM") == what_else(now, now, ended=KILLED) == ""


def test_of_a_possible_cause_the_log_is_advised_and_no_limit() -> None:
    me = made_rank(0)
    for cause, perhaps, fix, said in (
        ("its limit", "", "raise that limit", ": its limit"),
        ("", "possibly another one", "check the end of its log", "; possibly another one"),
    ):
        lost = Lost(rank=me, host="n", at="mesh", seconds=1, master=None, died=KILLED, cause=cause, perhaps=perhaps)
        (found,) = control_lost(lost)
        assert found.title.endswith(said)
        assert fix in repr(found.fix)


def test_no_limit_is_blamed_for_what_did_not_rise_or_for_another_ending() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        groups = Cgroups(
            memory=drawn.choice((None, drawn.randint(1 << 20, 1 << 40))),
            kills=drawn.randint(0, 9),
            host_kills=drawn.randint(0, 9),
            most_tasks=drawn.choice((None, 1000)),
            tasks=drawn.randint(0, 900),
            refused=drawn.randint(0, 9),
            paths=BQ,
        )
        rose = Cgroups(memory=1 << 20, kills=99, most_tasks=10, tasks=10, refused=99, host_kills=99)
        assert why(groups, groups, KILLED) == why(groups, groups, None, NO_THREAD) == ""
        assert why(groups, rose, "killed by SIGTERM") == why(groups, rose, None, "ValueError: shapes differ") == ""
