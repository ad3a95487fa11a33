"""Which limit refused an allocation is said where the figures decide it, and nothing where they do not."""

from itertools import product

from dsdoctor.memory.failure import HostLimits, asked_bytes, limit_lines, look_limits, refused_by
from tests.conftest import Disk
from tests.each import each

GIB = 1 << 30
SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12"
ROOM = {"total": 24 * GIB, "available": 12 * GIB, "swap": 0, "resident": 3 * GIB}
LIMITS = {
    "ulimit -v": ("mapped", "address_space"),
    "ulimit -d": ("data", "data_limit"),
    "overcommit_memory": ("committed", "commit_limit"),
}


@each("name", LIMITS)
def test_a_limit_is_named_when_what_was_asked_for_does_not_fit_under_it(name: str) -> None:
    had, limit = LIMITS[name]
    for taken, asked, most in product((1, 5, 7), (None, 1, 2, 4), (6, 8)):
        limits = HostLimits(**ROOM, **{had: taken * GIB, limit: most * GIB})  # type: ignore[arg-type]
        met = taken + asked > most if asked else taken > 0.97 * most
        assert (name in refused_by(asked and asked * GIB, limits)) is met, (taken, asked, most)


def test_more_than_the_machine_has_is_named() -> None:
    assert "the machine" in refused_by(64 * GIB, HostLimits(**ROOM))  # type: ignore[arg-type]
    assert refused_by(8 * GIB, HostLimits(**ROOM)) == ""  # type: ignore[arg-type]


def test_what_is_not_known_is_said_with_the_facts() -> None:
    lines = list(limit_lines(SAID.format(1000), HostLimits(**ROOM, group=4 * GIB, group_used=4 * GIB)))  # type: ignore[arg-type]

    assert lines == [
        "the limit that refused it is unknown: this process holds 3.0 GiB, 12.0 GiB of the host's 24.0 GiB are available, "
        "its control group holds 4.0 GiB of 4.0 GiB, and no limit of this process was met"
    ]


@each(
    ("said", "size"),
    (
        (SAID.format(2000000000), 2000000000),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * GIB // 2),
        ("Unable to allocate 512. MiB for an array with shape (4,)", GIB // 2),
        ("", None),
    ),
)
def test_what_was_asked_for(said: str, size: int | None) -> None:
    assert asked_bytes(said) == size


@each("version", (1, 2))
def test_the_smallest_limit_of_the_control_groups_counts_and_a_full_one_is_told(version: int, disk: Disk) -> None:
    base = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    machine = disk(
        {
            "/proc/self/cgroup": "7:cpu:/\n4:memory:/job/step\n" if version == 1 else "0::/job/step\n",
            "/proc/self/mountinfo": f"30 23 0:26 / {base} rw - {kind}\n",
            "/proc/self/status": "VmPeak:\t 2048 kB\nVmRSS:\t 1024 kB\n",
            f"{base}/cgroup.controllers": "memory\n",
            f"{base}/job/step/cgroup.procs": "1\n",
            f"{base}/job/memory.{limit}": f"{4 * GIB}\n",
            f"{base}/job/memory.{used}": f"{4 * GIB - 4096}\n",
            f"{base}/job/step/memory.{limit}": "9223372036854771712\n" if version == 1 else "max\n",
            f"{base}/job/step/memory.{used}": f"{GIB}\n",
        }
    )
    found = look_limits(machine)

    assert (found.group, found.group_used) == (4 * GIB, 4 * GIB - 4096)
    assert (found.mapped, found.resident, found.total) == (2 << 20, 1 << 20, None)
    assert list(limit_lines(SAID.format(1000), found)) == [
        "the limit that refused it is unknown: this process holds 1.0 MiB, its control group holds 4.0 GiB of 4.0 GiB, "
        "and no limit of this process was met"
    ]
