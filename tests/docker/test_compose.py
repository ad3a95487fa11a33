"""docker/compose.yaml: the ranks of each profile find each other, and what they start is there. No engine is needed."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.compose import FILE, document, mounts, of_profile, services, variables

PROFILES = ("comm", "train", "comm-gpu", "train-gpu")
each_profile = pytest.mark.parametrize("profile", PROFILES)


def test_every_service_is_of_one_profile_and_every_profile_is_taught():
    told = FILE.read_text().partition("\nname:")[0]

    assert sorted(name for profile in PROFILES for name in of_profile(profile)) == sorted(document()["services"])
    assert all(re.search(rf"\b{profile}\b(?!-)", told) for profile in PROFILES)
    assert all(name in told for name in variables())


@each_profile
def test_the_ranks_of_a_profile_are_one_world_and_meet_at_rank_0(profile: str):
    told = [environment for _, environment in services(profile).values()]
    first = next(name for name, (_, environment) in services(profile).items() if environment["RANK"] == "0")
    size = str(len(told))

    assert sorted(one["RANK"] for one in told) == [str(rank) for rank in range(len(told))]
    assert len(told) == 2
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in told} == {(size, first)}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert {(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in told} == {("0", "1")}


@each_profile
def test_only_rank_0_is_waited_for_and_each_has_a_name_and_the_network_of_the_ranks(profile: str):
    found = of_profile(profile)
    (master,) = {environment["MASTER_ADDR"] for _, environment in services(profile).values()}

    assert {name: one.get("depends_on", []) for name, one in found.items()} == {
        name: [] if name == master else [master] for name in found
    }
    assert {name: one["hostname"] for name, one in found.items()} == {name: name for name in found}
    assert all(one["networks"] == ["ranks"] for one in found.values())
    assert document()["networks"] == {"ranks": {"internal": True}}


@each_profile
def test_a_container_starts_a_program_of_the_image_on_a_script_that_is_mounted(profile: str):
    for command, environment in services(profile).values():
        assert command[0] in {"python", "dsdoctor"}
        assert {word for word in command if word.startswith("/")} == set(mounts(profile))
        assert "$" not in " ".join([*command, *environment.values()])
        if "-m" in command:
            assert importlib.util.find_spec(command[command.index("-m") + 1])
    assert all(path.is_file() for path in mounts(profile).values())


@each_profile
def test_a_container_is_given_room_and_nothing_that_it_could_break(profile: str):
    for one in of_profile(profile).values():
        assert one["image"] == "${DSDOCTOR_IMAGE:-dsdoctor}"
        assert one["init"] is True
        assert int(str(one["shm_size"]).removesuffix("gb")) >= 1
        assert all(volume["type"] == "bind" and volume["read_only"] for volume in one.get("volumes", ()))
        assert not {"ports", "privileged", "network_mode", "pid", "ipc", "user"} & set(one)


@each_profile
def test_each_rank_of_a_gpu_profile_has_a_gpu_of_its_own(profile: str):
    found = of_profile(profile).values()
    given = [one["deploy"]["resources"]["reservations"]["devices"] for one in found if "deploy" in one]
    memory = [one.get("ulimits", {}).get("memlock") for one in found]

    if not profile.endswith("-gpu"):
        assert (given, memory) == ([], [None, None])
        return
    assert [[device["capabilities"] for device in devices] for devices in given] == [[["gpu"]], [["gpu"]]]
    assert len({device["device_ids"][0] for devices in given for device in devices}) == 2
    assert memory == [-1, -1]


def started(command: list[str], environment: dict[str, str], **more: str) -> "subprocess.Popen[str]":
    """A service's command as a process here: its script in the checkout, its Python ours."""
    here = [str(mounts("train").get(word, word)) for word in command]
    assert here[0] == "python"
    return subprocess.Popen(
        [sys.executable, *here[1:]],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environment, "MASTER_ADDR": "127.0.0.1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.mark.launch
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed")
def test_the_ranks_of_the_training_learn_the_same_and_compile_nothing(tmp_path: Path):
    more = {"MASTER_PORT": free_port(), "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit")}
    ranks = [started(command, environment, **more) for command, environment in services("train").values()]
    try:
        told = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    assert "✓ trained: 2 ranks on cpu over gloo, " in told[0]
    assert "✓" not in told[1]
    assert not (tmp_path / "jit").exists(), "an op was compiled at run time"
