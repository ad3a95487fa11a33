"""`dsdoctor install` for real: an environment of its own with this torch, ops of DeepSpeed, an index on a port of this machine."""

import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.wheel.conftest import dsdoctor

pytestmark = pytest.mark.wheel
A, B = "pin_memory", "cpu_lion"
ROOT = Path(__file__).parents[2]
SOURCE = ("--source", "0.19.8")


class Environment:
    """A new environment that finds this one's torch, and has a DeepSpeed of its own or none."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = str(folder / "bin" / "python")
        site = next(folder.glob("lib/python*/site-packages"))
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        (site / "torch.pth").write_text(str(Path(torch.origin or "").parents[1]))
        (folder / "bin" / "ninja").symlink_to(shutil.which("ninja") or "")

    def install(self, *arguments: str) -> tuple[int, dict[str, object]]:
        return dsdoctor("install", "--python", self.python, *SOURCE, *arguments)

    def loads(self) -> set[str]:
        """The ops that verify finds in the installed DeepSpeed."""
        status, document = dsdoctor("wheel", "verify", "--installed", "--python", self.python)
        assert status == 0, document["findings"]
        return set(document["built"]["installed_ops"])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, out: Path) -> Environment:
    """One in which nothing was, and for which a wheel was built."""
    environment = Environment(tmp_path_factory.mktemp("first") / "env")
    status, document = environment.install("--ops", A, "--out", str(out))
    assert (status, document["did"], document["ops"]) == (0, "built", [A]), document["findings"]
    return environment


@pytest.fixture
def index(out: Path, first: Environment, tmp_path: Path) -> Iterator[str]:
    """The wheel that was built, and two that are for others by their names."""
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    (built,) = out.glob("*.whl")
    shutil.copy(built, folder)
    tag = built.name.partition("-0.19.8+")[2].partition("-")[2]
    links = [built.name, f"deepspeed-0.19.8+cu.12.8.torch.2.11-{tag}", f"deepspeed-0.20.0+cpu.torch2.13-{tag}"]
    (folder / "index.html").write_text("".join(f'<a href="{name}">{name}</a>\n' for name in links))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_is_there_and_fits_stays(first: Environment, tmp_path: Path) -> None:
    status, document = first.install("--ops", A, "--out", str(tmp_path))

    assert (status, document["did"], document["ops"]) == (0, "kept", [A])
    assert list(tmp_path.iterdir()) == []


def test_a_listed_wheel_that_fits_is_installed_and_the_others_are_named(index: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "second")

    status, document = environment.install("--ops", A, "--index-url", index)

    titles = [finding["title"] for one in document["candidates"] for finding in one["findings"]]
    assert (status, document["did"], document["ops"]) == (0, "installed", [A]), document["findings"]
    assert any("its name says torch 2.11" in title for title in titles)
    assert any("0.20.0" in title and "0.19.8" in title for title in titles)
    assert environment.loads() == {A}


def test_the_output_on_its_page_is_what_install_prints(index: str, tmp_path: Path) -> None:
    """Its op, index and names are others; the lines are the same."""
    text = (ROOT / "docs" / "commands" / "build.md").read_text(encoding="utf-8")
    (shown,) = re.findall(
        r"^\$ python -m dsdoctor install --ops cpu_adam --index-url \S+\n(.*?)^(?:```|\$)", text, SHOWN
    )
    python = Environment(tmp_path / "env").python
    argv = [sys.executable, "-m", "dsdoctor", "install", "--python", python, *SOURCE, "--ops", A, "--index-url", index]

    done = subprocess.run(argv, capture_output=True, text=True, check=True)

    printed = {shape(line) for line in done.stdout.splitlines()}
    assert {shape(line) for line in shown.splitlines()} - printed == set(), done.stdout


SHOWN = re.MULTILINE | re.DOTALL


def shape(line: str) -> str:
    """A line of an output without what is another one in each environment."""
    line = re.sub(r"https?://[\w.:]+(?:/simple)?/", "INDEX/", line)
    line = re.sub(r"\.[0-9a-f]{9}\b", ".TAG", line)
    line = re.sub(r"\bcp\d+-cp\d+-\w+", "PYTHON", line)
    line = re.sub(r"here is torch \S+:", "here is torch:", line)
    return line.replace("cpu_adam", "OP").replace(A, "OP").rstrip()


def test_a_later_build_with_more_ops_is_what_its_printed_line_installs(first: Environment, out: Path) -> None:
    argv = [sys.executable, "-m", "dsdoctor", "build-wheel", "--python", first.python, *SOURCE, "--ops", f"{A},{B}"]
    done = subprocess.run([*argv, "--out", out], capture_output=True, text=True, check=True, env=os.environ)
    printed = next(line for line in done.stdout.splitlines() if line.startswith("  next: $ ")).partition("$ ")[2]

    subprocess.run(["/bin/bash", "-c", f"{printed} --no-deps"], check=True, capture_output=True)

    assert first.loads() == {A, B}
    assert len(list(out.glob("*.whl"))) == 2
