"""What is trusted in a user namespace, where every user who has no number there has the same one: real namespaces, real owners."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

USER, STRANGER, GROUP, OTHER_GROUP = 54321, 55555, 54322, 55556
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")

ASK = """
import ctypes, json, os, sys
from pathlib import Path
from dsdoctor.checkpoint.universal import _held
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.files import sweep
from dsdoctor.core.trust import distrust
from dsdoctor.hang.channel import node_folder, node_name
from dsdoctor.builder.cache.store import CacheStore

PR_SET_DUMPABLE, CLONE_NEWUSER = 4, 0x10000000
libc = ctypes.CDLL(None, use_errno=True)
order = json.loads(sys.argv[1])

def told():
    answers = {name: distrust(Path(place), "*/bin/env") for name, place in order["places"].items()}
    return {**answers, "store": CacheStore(Path(order["places"]["shared"]), limit=1).distrust()}

node_name()
told()  # what is imported late is read while this is root: the user need not be able to read this Python
os.setgroups(order["groups"])
os.setresgid(order["user"], order["user"], order["user"])
os.setresuid(order["user"], order["user"], order["user"])
if order["namespace"]:
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its maps are root's
    if libc.unshare(CLONE_NEWUSER) != 0:
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
if order["inside"] is not None:
    Path("/proc/self/setgroups").write_text("deny")
    for kind in ("uid", "gid"):
        Path(f"/proc/self/{kind}_map").write_text(f"{order['inside']} {order['user']} 1")
own = Path(order["places"]["own"])
sweep(own, ".left-")
used = {"swept": not (own / ".left-by-a-kill").exists()}
for name, use in (
    ("hang", lambda: node_folder("key", user=os.geteuid(), bases=(str(own),))),
    ("converter", lambda: _held(own).__enter__()),
):
    try:
        use()
        used[name] = ""
    except (OSError, ImpossiblePlan) as error:
        used[name] = str(error)
print(json.dumps({"euid": os.geteuid(), "used": used, **told()}))
"""


@pytest.fixture
def places() -> Iterator[SimpleNamespace]:
    folder = Path(tempfile.mkdtemp(prefix="dsdoctor-test-"))
    own, strangers = folder / "own", folder / "strangers"
    shared, in_his = folder / "shared", strangers / "cache"
    to_system, to_stranger, in_group = folder / "to-system", folder / "to-stranger", folder / "in-group"
    left = (own / ".left-by-a-kill", *(own / f"dsdoctor-hang-{user}" for user in (0, USER, 65534)))
    for made in (own, *left, in_his, shared, to_system, to_stranger, strangers / "bin", in_group):
        made.mkdir(parents=True)
    (strangers / "bin" / "env").touch()
    (to_system / "x").symlink_to("/usr")
    (to_stranger / "x").symlink_to(strangers)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    for path, user, group in (
        (strangers, STRANGER, STRANGER),
        (strangers / "bin" / "env", STRANGER, STRANGER),
        (shared, STRANGER, OTHER_GROUP),
        (in_group, USER, OTHER_GROUP),
    ):
        os.chown(path, user, group)
    for path in (folder, strangers, *left):
        path.chmod(0o755)
    shared.chmod(0o2770)
    in_group.chmod(0o770)
    yield SimpleNamespace(
        own=own,
        in_his=in_his,
        his=strangers,
        shared=shared,
        to_system=to_system,
        to_stranger=to_stranger,
        group=in_group,
    )
    shutil.rmtree(folder)


def asked(places: SimpleNamespace, *, namespace: bool = True, inside: int | None = None) -> dict[str, Any]:
    """What the user says of each place in a namespace that maps this user alone, or nobody; skipped where the kernel makes none."""
    named = {name: str(place) for name, place in vars(places).items()}
    order = {"places": named, "user": USER, "groups": [GROUP], "namespace": namespace, "inside": inside}
    done = subprocess.run([sys.executable, "-c", ASK, json.dumps(order)], capture_output=True, text=True, check=False)
    if "no user namespace" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("inside", [0, USER])
def test_a_rootless_container_uses_its_own_folders_and_none_of_a_stranger(inside: int, places: SimpleNamespace) -> None:
    """/ and /tmp, which the way leads through, are of the host's root, as unmapped there as the stranger is."""
    told = asked(places, inside=inside)

    assert told["euid"] == inside
    assert told["own"] is None
    assert told["to_system"] is None
    for name in ("his", "in_his", "to_stranger", "shared", "store"):
        assert "a user that this user namespace does not map (65534), so it may be anyone's" in told[name], name
    assert "its group may write" in told["group"]
    assert "65534" in told["group"]
    assert told["used"] == {"swept": True, "hang": "", "converter": ""}


@pytest.mark.slow
def test_who_has_no_number_in_a_namespace_owns_nothing_there(places: SimpleNamespace) -> None:
    """Then this user's number is the one of all strangers."""
    told = asked(places)

    used = told.pop("used")
    assert told.pop("euid") == 65534
    assert all(told.values())
    assert not used["swept"]
    assert "shared with other users" in used["hang"]
    assert "shared with other users" in used["converter"]


@pytest.mark.slow
def test_outside_of_a_namespace_each_owner_is_told_by_name(places: SimpleNamespace) -> None:
    told = asked(places, namespace=False)

    assert told["own"] is told["to_system"] is None
    for name in ("his", "in_his", "to_stranger", "shared"):
        assert f"belongs to user {STRANGER}" in told[name], name
