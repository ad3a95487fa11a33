"""How the interpreter that answers about a configuration is started."""

from pathlib import Path

import pytest

from dsdoctor.config.answer import Request, ask
from dsdoctor.core.host import LocalHost


@pytest.mark.parametrize(("users", "wanted"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_it_reads_its_files_as_utf8_unless_the_user_said_otherwise(
    tmp_path: Path, users: str | None, wanted: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONUTF8" > {tmp_path}/said\n')
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "POSIX", **({} if users is None else {"PYTHONUTF8": users})}

    ask(LocalHost(env=env), str(python), Request(config={}))

    assert (tmp_path / "said").read_text() == f"{wanted}\n"
