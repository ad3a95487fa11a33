"""The command that carries a plan out is the one that asks for the same, whatever was asked."""

import dataclasses
import functools
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from dsdoctor.builder.build import build_command
from dsdoctor.cli.app import make_app
from dsdoctor.core.requests import BuildOrder, BuildRequest
from tests.cli.runner import run
from tests.cli.test_cli import MACHINES

REQUESTS: dict[str, tuple[Any, ...]] = {
    "ops": (("cpu_adam", "fused_adam"), ("all",)), "arch": ("8.0;9.0+PTX",), "accelerator": ("cpu",), "cpu": ("x86-64-v3",),
    "toolkit": ("pypi", "/usr/local/cu da"), "jobs": (3,), "local_version": ("-x", "cu13"), "no_local_version": (True,),
    "offline": (True,), "debug_info": (True,),
}  # fmt: skip
ORDERS: dict[str, tuple[Any, ...]] = {
    "config": (Path("ds config.json"),), "source": ("git+https://example.invalid/x.git",), "nodes": ((Path("a"), Path("b c")),),
    "python": ("/other/python",),
}  # fmt: skip
GIVEN = [(name, value) for table in (REQUESTS, ORDERS) for name, values in table.items() for value in values]
APART = [{"ops", "config"}, {"local_version", "no_local_version"}]


def order_of(given: dict[str, Any]) -> BuildOrder:
    request = BuildRequest(**{name: value for name, value in given.items() if name in REQUESTS})
    return BuildOrder(request=request, **{name: value for name, value in given.items() if name in ORDERS})


@functools.cache
def app() -> Any:
    return make_app("build-wheel")


def parsed(command: str) -> BuildOrder:
    """What build-wheel makes of the words."""
    python, module, name, *words = shlex.split(command)
    assert (python, module, name) == ("python", "-m", "dsdoctor")
    _, bound, *_ = app().parse_args(words, exit_on_error=False, print_error=False)
    order = bound.arguments.get("order") or BuildOrder()
    (interpreter,) = bound.arguments.get("python") or (sys.executable,)
    return dataclasses.replace(order, python=interpreter)


def test_the_command_asks_for_all_that_was_asked() -> None:
    given = {name: value for name, value in GIVEN if name not in {"config", "no_local_version"}}

    assert parsed(build_command(order_of(given)).line) == order_of(given)


@pytest.mark.slow
def test_the_command_asks_for_what_was_asked_one_by_one_and_in_pairs() -> None:
    orders = [
        dict(each) for count in (0, 1, 2) for each in itertools.combinations(GIVEN, count) if len(dict(each)) == count
    ]
    orders = [given for given in orders if not any(pair <= set(given) for pair in APART)]
    wrong = [given for given in orders if parsed(build_command(order_of(given)).line) != order_of(given)]

    assert wrong == []
    assert len(orders) > 140


def shown(kind: type) -> set[str]:
    """The fields that are options."""
    fields = dataclasses.fields(kind)
    return {
        each.name for each in fields if all(getattr(part, "parse", None) is not False for part in get_args(each.type))
    }


def test_every_option_of_a_build_is_among_them() -> None:
    assert shown(BuildRequest) == set(REQUESTS)
    assert shown(BuildOrder) - {"request"} == set(ORDERS) - {"python"}


@pytest.mark.slow
def test_a_plan_with_options_ends_in_the_command_that_carries_it_out(tmp_path: Path) -> None:
    machine = str(MACHINES / "one-toolkit.json")
    planned = run("plan", "--machine", machine, "--ops", "cpu_adam", "--jobs", "2", DSDOCTOR_CACHE=str(tmp_path))
    dry = run("build-wheel", "--dry-run", "--jobs", "2", "--out", str(tmp_path), "--no-cache")

    assert planned.stdout.splitlines()[-1] == (
        "  next: $ python -m dsdoctor build-wheel --ops cpu_adam --jobs 2  # on the machine of that snapshot"
    )
    assert dry.stdout.splitlines()[-1] == (
        f"  next: $ python -m dsdoctor build-wheel --jobs 2 --out {tmp_path} --no-cache"
    )
