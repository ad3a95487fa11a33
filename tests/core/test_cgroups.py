"""The control groups of a process as the kernel shows them: v1, v2, in a container, and where they are not mounted."""

import itertools

import pytest

from dsdoctor.core.cgroups import Cgroups, read_cgroups
from tests.conftest import Disk

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "3{n} 23 0:3{n} {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
V2 = {
    "cgroup.controllers": "cpuset cpu io memory pids\n",
    "cgroup.procs": "1\n",
    "cpu.max": "12000 100000\n",
    "cpu.stat": "usage_usec 9\nnr_periods 80\nnr_throttled 75\nthrottled_usec 7\n",
    "memory.max": "440401920\n",
    "memory.events": "low 0\nhigh 0\nmax 51\noom 2\noom_kill 2\n",
    "pids.max": "64\n",
    "pids.current": "63\n",
    "pids.events": "max 5\n",
}
WANTED = (0.12, 80, 75, 440401920, 2, 64, 63, 5)


def figures(found: Cgroups) -> tuple[object, ...]:
    return (
        found.quota,
        found.periods,
        found.throttled,
        found.memory,
        found.kills,
        found.most_tasks,
        found.tasks,
        found.refused,
    )


@pytest.mark.parametrize(
    "root, path, folder",
    [("/", "/job/step", "/job/step"), ("/", "/", ""), ("/docker/ab", "/docker/ab", ""), ("/", "/job/step", "/job")],
)
def test_of_version_2_the_tightest_group_of_the_process_and_those_above_it_counts(
    disk: Disk, root: str, path: str, folder: str
) -> None:
    top = {f"/sys/fs/cgroup{below}/{name}": V2[name] for name in V2 if "cgroup." in name for below in ("", "/job")}
    limits = {f"/sys/fs/cgroup{folder}/{name}": text for name, text in V2.items()}
    looser = {"/sys/fs/cgroup/job/step/cpu.max": "max 100000\n", "/sys/fs/cgroup/job/step/pids.max": "max\n"}
    for stale in ("cpu.max", "pids.max"):
        limits.setdefault(f"/sys/fs/cgroup/{stale}", "max\n")
    machine = disk(
        {
            "/proc/self/cgroup": f"0::{path}\n",
            "/proc/self/mountinfo": V2_MOUNT.format(root=root),
            **looser,
            **top,
            **limits,
        }
    )

    assert figures(read_cgroups(machine)) == WANTED


def test_of_version_1_each_controller_has_its_own_mount_and_group(disk: Disk) -> None:
    machine = disk(
        {
            "/proc/self/cgroup": "9:name=systemd:/\n8:pids:/p\n4:memory:/job\n1:cpu,cpuacct:/q/r\n0::/\n",
            "/proc/self/mountinfo": "".join(
                V1_MOUNT.format(n=number, root="/", name=name) for number, name in enumerate(("cpu", "memory", "pids"))
            ),
            **{f"/sys/fs/cgroup/{folder}/cgroup.procs": "1\n" for folder in ("cpu/q/r", "memory/job", "pids/p")},
            "/sys/fs/cgroup/cpu/q/r/cpu.cfs_quota_us": "-1\n",
            "/sys/fs/cgroup/cpu/q/r/cpu.cfs_period_us": "100000\n",
            "/sys/fs/cgroup/cpu/q/cpu.cfs_quota_us": "12000\n",
            "/sys/fs/cgroup/cpu/q/cpu.cfs_period_us": "100000\n",
            "/sys/fs/cgroup/cpu/q/cpu.stat": "nr_periods 80\nnr_throttled 75\nthrottled_time 7000\n",
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "440401920\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "/sys/fs/cgroup/pids/p/pids.max": "64\n",
            "/sys/fs/cgroup/pids/p/pids.current": "63\n",
            "/sys/fs/cgroup/pids/p/pids.events": "max 5\n",
        }
    )

    found = read_cgroups(machine)

    assert figures(found) == WANTED
    assert (found.paths["cpu"], found.unseen) == ("/q/r", ())


@pytest.mark.parametrize("above, own", [(0, 1), (0, 7), (3, 0)])
def test_of_version_1_a_kill_counts_in_the_processs_own_group_whichever_limit_was_reached(
    disk: Disk, above: int, own: int
) -> None:
    for limits in itertools.product((440401920, 9223372036854771712), repeat=2):
        groups = {"job": (limits[0], above), "job/task": (limits[1], own)}
        found = read_cgroups(
            disk(
                {
                    "/proc/self/cgroup": "4:memory:/job/task\n",
                    "/proc/self/mountinfo": V1_MOUNT.format(n=0, root="/", name="memory"),
                    "/sys/fs/cgroup/memory/job/task/cgroup.procs": "1\n",
                    **{
                        f"/sys/fs/cgroup/memory/{folder}/{name}": text
                        for folder, (limit, kills) in groups.items()
                        for name, text in (
                            ("memory.limit_in_bytes", f"{limit}\n"),
                            ("memory.oom_control", f"oom_kill_disable 0\noom_kill {kills}\n"),
                        )
                    },
                }
            )
        )
        limited = min(limits) == 440401920
        assert (found.memory, found.kills) == ((440401920, own) if limited else (None, 0))


def test_of_equal_limits_the_one_that_held_back_counts(disk: Disk) -> None:
    for inner, outer in ((0, 95), (95, 0), (40, 95)):
        held = {"/a": outer, "/a/b": inner}
        found = read_cgroups(
            disk(
                {
                    "/proc/self/cgroup": "0::/a/b\n",
                    "/proc/self/mountinfo": V2_MOUNT.format(root="/"),
                    "/sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
                    "/sys/fs/cgroup/a/b/cgroup.procs": "1\n",
                    **{f"/sys/fs/cgroup{folder}/cpu.max": "200000 100000\n" for folder in held},
                    **{
                        f"/sys/fs/cgroup{folder}/cpu.stat": f"nr_periods 100\nnr_throttled {count}\n"
                        for folder, count in held.items()
                    },
                    **{f"/sys/fs/cgroup{folder}/pids.max": "64\n" for folder in held},
                    **{f"/sys/fs/cgroup{folder}/pids.current": "50\n" for folder in held},
                    **{f"/sys/fs/cgroup{folder}/pids.events": f"max {count}\n" for folder, count in held.items()},
                }
            )
        )

        assert (found.quota, found.throttled, found.refused) == (2.0, max(inner, outer), max(inner, outer))


@pytest.mark.parametrize("path", ["/other", "/docker/abc", "/docker", "/"])
def test_limits_of_groups_that_the_process_is_not_in_are_not_read(disk: Disk, path: str) -> None:
    found = read_cgroups(
        disk(
            {
                "/proc/self/cgroup": f"0::{path}\n",
                "/proc/self/mountinfo": V2_MOUNT.format(root="/docker/ab"),
                **{f"/sys/fs/cgroup/{name}": text for name, text in V2.items()},
            }
        )
    )

    assert found == Cgroups(paths=dict.fromkeys(("cpu", "memory", "pids"), path), unseen=("cpu", "memory", "pids"))


def test_groups_whose_files_are_not_mounted_are_told(disk: Disk) -> None:
    found = read_cgroups(
        disk(
            {
                "/proc/self/cgroup": "8:pids:/bq\n",
                "/proc/self/mountinfo": "",
                "/proc/vmstat": "nr_dirty 4\noom_kill 3\n",
            }
        )
    )

    assert found == Cgroups(host_kills=3, paths={"pids": "/bq"}, unseen=("pids",))
