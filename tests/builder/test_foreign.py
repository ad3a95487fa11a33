"""Which names a DeepSpeed wheel may hold: those of every release, and nobody else's."""

import pytest

from dsdoctor.builder.wheel.read import foreign_files, foreign_installed

SCRIPTS = (
    *("deepspeed", "deepspeed.pt", "deepspeed.bat", "ds", "ds_ssh", "ds_report", "ds_report.bat", "ds_bench"),
    *("dsr", "ds_elastic", "ds_nvme_tune", "ds_io"),
)
"""All that setup.py has listed from 0.1 to 0.19."""

HEALTHY = (
    "deepspeed/__init__.py",
    "deepspeed/ops/op_builder/all_ops.py",
    "deepspeed/ops/csrc/includes/x.h",
    "deepspeed/evil.pth",
    "op_builder/__init__.py",
    "deepspeed.libs/libaio-4ab2c9.so.1",
    "torch/",
    "deepspeed-0.19.8.dist-info/RECORD",
    "deepspeed-0.19.8+cu13.0.torch2.14.dist-info/sboms/deepspeed.cdx.json",
    "deepspeed-0.19.8.dist-info/licenses/LICENSE",
    "deepspeed-0.19.8.data/purelib/deepspeed/x.py",
    *(f"deepspeed-0.19.8.data/scripts/{name}" for name in SCRIPTS),
)
OF_OTHERS = (
    "torch/__init__.py",
    "evil.pth",
    "deepspeed.py",
    "deepspeed",
    "./sitecustomize.py",
    "Deepspeed/x.py",
    "torch-2.14.dist-info/RECORD",
    "deepspeed-0.19.8.data/scripts/python",
    "deepspeed-0.19.8.data/scripts/ds/python",
    "deepspeed-0.19.8.data/purelib/evil.pth",
    "deepspeed-0.19.8.data/platlib/torch/__init__.py",
    "deepspeed-0.19.8.data/data/bin/python",
    "deepspeed-0.19.8.data/headers/Python.h",
    "deepspeed-0.19.8.data/purelib/deepspeed-1.dist-info/entry_points.txt",
    "x.data/scripts/ds",
    "deepspeed-0.19.8.data/scripts",
    "tests/unit/test_x.py",
    "deepspeed/__pycache__/__init__.cpython-311.pyc",
)


def test_what_deepspeeds_wheels_hold_is_their_own() -> None:
    assert foreign_files(HEALTHY, "0.19.8+cu13.0.torch2.14") == ()


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_belongs_to_nobody_or_others_is_named(name: str) -> None:
    assert foreign_files([*HEALTHY, name], "0.19.8") == (name,)


@pytest.mark.parametrize("version", ["0.7.1", "0.8.3+cu118", "0.9.0"])
def test_releases_before_0_9_packed_their_benchmarks_and_tests(version: str) -> None:
    names = ("benchmarks/communication/run_all.py", "tests/unit/common.py", "accelerator/x.py")

    assert foreign_files(names, version) == (() if version < "0.9" else tuple(sorted(names)))


def test_commands_that_entry_points_would_make_count_too() -> None:
    text = (
        "a line that is none\n[pytest_randomly.random_seeder]\ndeepspeed = deepspeed.runtime.utils:set_random_seed\n"
        "[ console_scripts ]\n# sh = x\nds_top=deepspeed.top:main\n pip = deepspeed.x:main\n"
        "[gui_scripts]\npython3=deepspeed.x:main\n"
    )

    assert foreign_files(HEALTHY, "0.19.8", text) == ("the command pip", "the command python3")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[torch.backends]\nx = deepspeed.evil:run", "[torch.backends] x = deepspeed.evil:run"),
        ("[pytest11]\r\nx=deepspeed.evil", "[pytest11] x = deepspeed.evil"),
        ("[distutils.commands]\nbuild=deepspeed.evil:run", "[distutils.commands] build = deepspeed.evil:run"),
        ("[setuptools.finalize_distribution_options]\nx=d:y", "[setuptools.finalize_distribution_options] x = d:y"),
        ("[babel.checkers]\nx=deepspeed.evil:run", "[babel.checkers] x = deepspeed.evil:run"),
        (
            "[pytest_randomly.random_seeder]\ndeepspeed = os:system",
            "[pytest_randomly.random_seeder] deepspeed = os:system",
        ),
        ("x=os:system", "[] x = os:system"),
        (
            "[pytest_randomly.random_seeder]\ndeepspeed = deepspeed.runtime.utils:set_random_seed\n  , os:system",
            "[pytest_randomly.random_seeder] , os:system, which is not a valid one",
        ),
    ],
)
def test_an_entry_point_that_no_release_has_is_named(text: str, named: str) -> None:
    own = "[pytest_randomly.random_seeder]\ndeepspeed = deepspeed.runtime.utils:set_random_seed\n"

    assert foreign_files(HEALTHY, "0.19.8", f"{text}\n{own}") == (f"entry point {named}",)
    assert foreign_installed(INSTALLED, "0.19.8", f"{text}\n{own}") == (f"entry point {named}",)
    assert foreign_installed(INSTALLED, "0.19.8", own) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "[torch.backends] x\nds=deepspeed.evil:run",
            ("[torch.backends] x] ds = deepspeed.evil:run", "group [torch.backends] x, which is not closed"),
        ),
        ("[console_scripts\nds_top=deepspeed.top:main", ("group [console_scripts, which is not closed",)),
    ],
)
def test_a_group_that_is_not_closed_is_named(text: str, named: tuple[str, ...]) -> None:
    """importlib.metadata fails by it, and with it every import of torch."""
    assert foreign_files(HEALTHY, "0.19.8", text) == tuple(sorted(f"entry point {each}" for each in named))


INSTALLED = (
    *("deepspeed/__init__.py", "./deepspeed/x.py", "deepspeed/__pycache__/x.cpython-311.pyc", "op_builder/all_ops.py"),
    *("deepspeed-0.19.8.dist-info/INSTALLER", "deepspeed.libs/libaio-4ab2c9.so.1"),
    *(
        f"{folder}/{name}"
        for name in SCRIPTS
        for folder in ("../../../bin", "../../bin", "../../Scripts", "/opt/x/bin")
    ),
)
EDITABLE = ("__editable__.deepspeed-0.19.8.pth", "__pycache__/__editable___deepspeed_0_19_8_finder.cpython-311.pyc")


def test_what_installers_list_of_a_deepspeed_is_its_own() -> None:
    assert foreign_installed(INSTALLED, "0.19.8") == ()
    assert foreign_installed(["benchmarks/x.py"], "0.8.3") == ()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "evil.pth",
            "sitecustomize.py",
            "__pycache__/sitecustomize.cpython-311.pyc",
            "torch/__init__.py",
            "deepspeed.pth",
        ),
        *("../../../bin/python", "../../../etc/ds", "../ds", "/bin/sh", "../torch/x.py", "torch-2.14.dist-info/RECORD"),
    ],
)
def test_what_an_installed_deepspeed_lists_of_others_is_named(name: str) -> None:
    assert foreign_installed([*INSTALLED, name], "0.19.8") == (name,)


def test_what_an_editable_install_puts_beside_is_its_own_only_there() -> None:
    assert foreign_installed(EDITABLE, "0.19.8", editable=True) == ()
    assert set(foreign_installed(EDITABLE, "0.19.8")) == set(EDITABLE)
    assert foreign_installed(["evil.pth"], "0.19.8", editable=True) == ("evil.pth",)
