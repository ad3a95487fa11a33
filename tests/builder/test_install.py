"""What `install` decides before anything is installed. The real thing: tests/wheel/test_install.py."""

import pytest

from dsdoctor.builder.install import InstallAction, Installed, asks_for_a_build
from dsdoctor.cli.install import installed_lines, status_of
from dsdoctor.core.finding import Finding
from dsdoctor.core.requests import BuildOrder, BuildRequest


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (BuildRequest(), False),
        (BuildRequest(ops=("cpu_adam",), jobs=2, offline=True), False),
        (BuildRequest(arch="9.0"), True),
        (BuildRequest(cpu="v3"), True),
        (BuildRequest(accelerator="cpu"), True),
        (BuildRequest(toolkit="pypi"), True),
        (BuildRequest(debug_info=True), True),
        (BuildRequest(no_local_version=True), True),
        (BuildRequest(local_version="mine"), True),
    ],
)
def test_options_that_say_how_to_build_lead_to_a_build(request_: BuildRequest, expected: bool) -> None:
    assert asks_for_a_build(BuildOrder(request=request_)) is expected


def test_a_wheel_that_fits_and_cannot_be_installed_is_a_failure_and_nothing_was_installed() -> None:
    failed = Installed(
        did=InstallAction.NOTHING, wheel="w.whl", findings=(Finding.error("wheel-not-installed", "no space"),)
    )

    assert status_of(failed) == 4
    assert list(installed_lines(failed))[-1] == "✗ nothing was installed"
