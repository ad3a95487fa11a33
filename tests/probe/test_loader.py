"""The list of shared libraries that an op finds, on small trees that play machines."""

from collections.abc import Mapping

import pytest

from dsdoctor.core.host import LocalHost
from dsdoctor.core.snapshot import RecordedHost, Recorder
from dsdoctor.probe.paths import find_loadable
from dsdoctor.probe.python import Environment
from tests.conftest import PYTHON, Disk

ENVIRONMENT = Environment(python=PYTHON, torch="/venv/lib/python3.11/site-packages/torch")
MULTIARCH = "/lib/x86_64-linux-gnu"


def cache(*paths: str) -> Mapping[str, str]:
    """A loader's cache as ldconfig writes it, as far as its table of strings goes."""
    listed = (f"{MULTIARCH}/libc.so.6", *paths)
    return {"/etc/ld.so.cache": "glibc-ld.so.cache1.1\0" + "".join(f"{path}\0" for path in listed)}


def test_what_the_cache_names_and_is_there_is_found(disk: Disk) -> None:
    gomp, gone = f"{MULTIARCH}/libgomp.so.1", f"{MULTIARCH}/libaio.so.1"
    host = disk({**cache(gomp, gone, "/lib32/libcufile.so.0"), gomp: "", "/lib32/libcufile.so.0": ""})

    assert find_loadable(host, ENVIRONMENT) == {"libgomp.so.1"}


@pytest.mark.parametrize(
    "folder",
    [
        "/opt/own",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/venv/lib",
        "/conda/lib",
        "/venv/lib/python3.11/site-packages/torch/lib",
        "/venv/lib/python3.11/site-packages/nvidia/cu13/lib",
    ],
)
def test_a_library_is_found_wherever_an_op_would_find_it(folder: str, disk: Disk) -> None:
    files = {**cache(), f"{folder}/libcufile.so.0": "", "/conda/bin/python3.11": ""}
    host = disk(files, links={"/venv/bin/python": "/conda/bin/python3.11"}, LD_LIBRARY_PATH="/opt/own:relative")

    assert find_loadable(host, ENVIRONMENT) == {"libcufile.so.0"}


def test_a_library_of_another_name_or_beside_the_way_is_not_found(disk: Disk) -> None:
    site = "/venv/lib/python3.11/site-packages"
    host = disk({**cache(), f"{site}/torch/lib/libgomp-a34b3233.so.1": "", "/opt/x/libaio.so.1": ""})

    assert find_loadable(host, ENVIRONMENT) == frozenset()


def test_what_cannot_be_known_is_not_judged(disk: Disk) -> None:
    musl = disk({"/lib/ld-musl-x86_64.so.1": ""})

    assert find_loadable(musl, ENVIRONMENT) is None
    assert find_loadable(LocalHost(env={}), None) is None


def test_a_snapshot_answers_alike_and_an_older_one_not_at_all(disk: Disk) -> None:
    gomp = f"{MULTIARCH}/libgomp.so.1"
    recorder = Recorder(disk({**cache(gomp), gomp: ""}))
    here = find_loadable(recorder, ENVIRONMENT)
    recorded = RecordedHost(recorder.snapshot)

    assert find_loadable(recorded, ENVIRONMENT) == here == {"libgomp.so.1"}
    recorder.snapshot.answers.clear()
    assert find_loadable(recorded, ENVIRONMENT) is None
