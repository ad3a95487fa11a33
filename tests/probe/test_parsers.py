"""Every parser of foreign text takes any text: it answers or says "not there", and raises nothing but our own errors."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.builder.make.commands import first_error
from dsdoctor.builder.make.manifest import decode
from dsdoctor.builder.wheel.shared_object import parse_producers
from dsdoctor.checks import examine
from dsdoctor.core.architectures import parse_architectures
from dsdoctor.core.children import parse_answer
from dsdoctor.core.deepspeed_install import parse_version_info, recorded_wheel_digest
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.host import Answer
from dsdoctor.core.machine import Cuda, Machine
from dsdoctor.core.snapshot import RecordedHost
from dsdoctor.probe import probe
from dsdoctor.probe.paths import parse_compiler_version
from dsdoctor.probe.python import (
    Environment,
    parse_assignment,
    parse_bounds,
    parse_cxx_standard,
    parse_known_architectures,
)
from dsdoctor.probe.system import (
    parse_cpu_flags,
    parse_cpu_max,
    parse_cpu_model,
    parse_glibc,
    parse_meminfo,
    parse_os_release,
)
from dsdoctor.probe.toolkits import parse_cuda_header, parse_host_config, parse_nvcc, parse_top
from tests.machines.make import HERE

WORDS = st.sampled_from(
    [
        *(
            "release ",
            "V13.0.88",
            "#$ TOP=/",
            "g++ (x) 12.2.0",
            "clang version ",
            "__cplusplus < 20",
            "= '",
            "cuda",
            "sm_90",
        ),
        *(
            "flags\t: avx",
            "MemTotal: 12 kB",
            "max 100000",
            "PRETTY_NAME=",
            "supported_arches = [",
            "CUDA_GCC_VERSIONS = {",
        ),
        *(
            "'13.0': ((6, 0), (",
            "GNU C++20 -march=",
            "DSDOCTOR {",
            "installed_ops={",
            "9" * 500,
            "\n",
            "\0",
            "²",
            ";",
            "+PTX",
        ),
    ]
)
TEXT = st.one_of(st.text(max_size=300), st.lists(WORDS, max_size=12).map("".join))
PARSERS: tuple[Callable[[str], Any], ...] = (
    Cuda.parse,
    parse_nvcc,
    parse_top,
    parse_cuda_header,
    parse_host_config,
    parse_compiler_version,
    parse_cpu_flags,
    parse_cpu_model,
    parse_cpu_max,
    parse_glibc,
    parse_meminfo,
    parse_os_release,
    parse_cxx_standard,
    parse_known_architectures,
    parse_version_info,
    recorded_wheel_digest,
    lambda text: parse_assignment(text, "cuda"),
    lambda text: parse_bounds(text, "CUDA_GCC_VERSIONS", Cuda(13, 0)),
    lambda text: parse_producers(text.encode()),
    lambda text: first_error(text.splitlines()),
    lambda text: parse_answer(Answer(returncode=0, stdout=text), Environment, "q"),
)


@given(TEXT)
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    for parse in PARSERS:
        parse(text)


def test_digits_that_are_no_numbers_are_no_numbers() -> None:
    assert parse_cpu_max("² 1") is None


@given(TEXT)
def test_any_architecture_list_is_read_or_refused_by_us(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_architectures(text)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_malformed(data: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decode(data)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """A JSON value with one inner value exchanged."""
    if isinstance(value, dict) and value and path:
        name = sorted(value)[path[0] % len(value)]
        return {**value, name: replaced(value[name], path[1:], new)}
    if isinstance(value, list) and value and path:
        place = path[0] % len(value)
        return [*value[:place], replaced(value[place], path[1:], new), *value[place + 1 :]]
    return new


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), st.lists, max_leaves=5)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.lists(st.integers(0, 500), min_size=1, max_size=3), new=JSON)
def test_a_snapshot_with_anything_in_it_is_a_machine_or_our_error(path: list[int], new: Any, tmp_path: Path) -> None:
    whole = json.loads((HERE / "hpc-modules.json").read_text(encoding="utf-8"))
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(replaced(whole, path, new)))

    with contextlib.suppress(DoctorError):
        host = RecordedHost.load(file)
        machine = probe(host, python=host.snapshot.python, cache=host.snapshot.cache)
        assert isinstance(machine, Machine)
        assert all(topic.summary for topic in examine(machine))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_snapshot_or_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(data)

    with pytest.raises(UsageError, match="snapshot"):
        RecordedHost.load(file)


def test_a_record_of_more_ops_than_there_can_be_is_read_in_part() -> None:
    ops = ", ".join(f"'op{number}': 1" for number in range(180_000))

    assert parse_version_info(f"version='0.19.8'\ninstalled_ops={{{ops}}}\n") == {"version": "0.19.8"}
