"""Noisy logs of runs and builds that went well (``healthy.txt``): nothing in them is an error."""

from pathlib import Path

from dsdoctor.core.finding import has_error
from tests.diagnosis.reading import diagnose
from tests.each import each

TEXT = (Path(__file__).parent / "healthy.txt").read_text(encoding="utf-8")
LOGS = {name: log.split("\n") for name, _, log in (block.partition("\n") for block in TEXT.split("\n== ")[1:])}
STEPS = [f"step {number} loss 1.{number}" for number in range(80)]


@each("name", LOGS)
def test_a_noisy_log_that_ended_well_has_no_error(name: str) -> None:
    log = LOGS[name]

    assert not has_error(diagnose(log).findings)


@each("name", LOGS)
def test_nor_has_it_one_where_the_noise_is_long_ago(name: str) -> None:
    log = LOGS[name]

    assert not has_error(diagnose([*log[:-3], *STEPS, *log[-3:]]).findings)
