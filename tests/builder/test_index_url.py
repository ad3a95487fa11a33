"""`pick` and `verify` with the address of a package index: a real server, real wheels, a recorded machine."""

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.wheel.index import facts_of_name, list_wheels, publish
from tests.builder.test_pick import MACHINE, library  # noqa: F401
from tests.builder.test_wheel import NAME, contents, wheel
from tests.cli.runner import run

TOKEN = "hunter2secret"


@dataclass
class Served:
    """A folder on a port of this machine, and what was asked of it."""

    folder: Path
    address: str = ""
    asked: list[str] = field(default_factory=list)
    instead: Any = None
    """A page in place of the project's own: content, type, encoding."""

    def fetched(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self.asked if path.endswith(".whl")}


@pytest.fixture
def index(library: bytes, tmp_path: Path) -> Iterator[Served]:  # noqa: F811
    """An index with a wheel that fits, and others whose names say that they do not."""
    served = Served(tmp_path / "index")
    made = tmp_path / "made"
    made.mkdir()
    good = wheel(made, contents(library))
    publish(good, served.folder)
    for other in (
        NAME.replace("torch2.14", "torch2.11").replace("0.19.8", "0.19.9"),
        NAME.replace("cu13.0.torch2.14", "cu.12.8.torch.2.14").replace("0.19.8", "0.19.10"),
        NAME.replace("cp311-cp311", "cp312-cp312"),
    ):
        (served.folder / "deepspeed" / other).write_bytes(b"never fetched")
    list_wheels(served.folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(served.folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if served.instead is None or not self.path.endswith("/deepspeed/"):
                super().do_GET()
                return
            content, kind, encoding = served.instead
            self.send_response(200)
            self.send_header("Content-Type", kind)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            served.asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    served.address = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()


def test_pick_fetches_only_what_its_name_does_not_exclude(index: Served) -> None:
    done = run("wheel", "pick", index.address, *MACHINE, "--json")

    document = json.loads(done.stdout)
    titles = [found["title"] for one in document["wheels"] for found in one["findings"]]
    assert (done.returncode, document["wheel"]) == (0, f"{index.address}/deepspeed/{NAME.replace('+', '%2B')}")
    assert index.fetched() == {NAME.replace("+", "%2B")}
    assert any("torch 2.11" in title and "torch 2.14" in title for title in titles)
    assert any("CUDA 12.8" in title and "torch 2.14" in title for title in titles)


def test_verify_takes_the_address_of_a_wheel_and_of_an_index(index: Served) -> None:
    of_wheel = run("wheel", "verify", f"{index.address}/deepspeed/{NAME}", *MACHINE)
    of_index = run("wheel", "verify", index.address, *MACHINE)

    assert (of_wheel.returncode, of_index.returncode) == (0, 0), of_wheel.stderr
    assert of_wheel.stdout == of_index.stdout.replace("%2B", "+")
    assert "DeepSpeed 0.19.8" in of_wheel.stdout


def test_a_wheel_that_is_not_what_its_index_says_is_not_judged(index: Served) -> None:
    with (index.folder / "deepspeed" / NAME).open("ab") as file:
        file.write(b"more")

    done = run("wheel", "pick", index.address, *MACHINE)
    named = run("wheel", "verify", f"{index.address}/deepspeed/{NAME}#sha256={'0' * 64}", *MACHINE)

    assert done.returncode == 1
    assert "its index says" in done.stdout
    assert (named.returncode, "its index says" in named.stdout) == (1, True)


@pytest.mark.parametrize("place", ["/nothing", ":1/simple", ""])
def test_no_word_of_a_password_is_shown(index: Served, place: str) -> None:
    host = index.address.removeprefix("http://") if not place.startswith(":") else f"127.0.0.1{place}"
    address = f"http://user:{TOKEN}@{host}{place if place.startswith('/') else ''}?token={TOKEN}"

    for command in (
        ("wheel", "pick", address),
        ("wheel", "pick", address, "--json"),
        ("wheel", "verify", address),
    ):
        done = run(*command, *MACHINE)
        assert TOKEN not in done.stdout + done.stderr
        assert done.returncode in {0, 2, 4}


def test_no_token_on_the_way_to_an_index_is_shown(index: Served) -> None:
    token = "AbCdEf0123456789"
    (index.folder / "basic" / token).mkdir(parents=True)
    (index.folder / "basic" / token / "simple").symlink_to(index.folder)
    address = f"{index.address}/basic/{token}/simple"

    for place in (f"{address}/", f"{address}/deepspeed/{NAME}", f"{address}/none/"):
        for command in (("wheel", "pick", place), ("wheel", "pick", place, "--json"), ("wheel", "verify", place)):
            done = run(*command, *MACHINE)
            assert token not in done.stdout + done.stderr
    assert any(token in path and path.endswith(".whl") for path in index.asked)


def test_what_is_no_index_is_said_in_one_line(index: Served) -> None:
    (index.folder / "deepspeed" / "index.html").write_bytes(b"\x00\x01\x02")
    nothing = run("wheel", "pick", f"{index.address}/elsewhere", *MACHINE)
    empty = run("wheel", "pick", index.address, *MACHINE)

    assert (nothing.returncode, empty.returncode) == (2, 2)
    assert "has no DeepSpeed wheels" in nothing.stderr
    assert empty.stderr.count("✗") == 1


@pytest.mark.parametrize(
    ("name", "cuda", "torch"),
    [
        ("0.18.9+cu.12.8.torch.2.11", "12.8", "2.11"),
        ("0.19.8+cu13.0.torch2.14.b1a2b3c4d", "13.0", "2.14"),
        ("0.16.4+cu124torch2.6", "12.4", "2.6"),
        ("0.15.0+torch2.4cu121", "12.1", "2.4"),
        ("0.19.8+cpu.torch2.13", None, "2.13"),
        ("0.19.8+unknown", None, None),
        ("0.19.8", None, None),
    ],
)
def test_names_say_torch_and_cuda_in_several_ways(name: str, cuda: str | None, torch: str | None) -> None:
    facts = facts_of_name(f"deepspeed-{name}-cp311-cp311-linux_x86_64.whl")

    assert facts is not None
    assert (facts.cuda, facts.torch) == (cuda, torch)


HOSTILE_PAGES = {
    "endless": (b"0" * (5 << 20), "text/html", None, "its page has more than 4 MiB"),
    "nested": (b"[" * 200_000, "application/vnd.pypi.simple.v1+json", None, "is not a package index: its page is"),
    "no parser takes it": (b"<![" * 10_000, "text/html", None, "its page is malformed"),
    "unclosed": (b"<a " * 60_000, "text/html", None, "its page has more than 50000 tags"),
    "many tags": (b"<a>" * 60_000, "text/html", None, "its page has more than 50000 tags"),
    "a compressed bomb": (
        gzip.compress(b"0" * (64 << 20)),
        "text/html",
        "gzip",
        "it is compressed",
    ),
    "a picture": (b"GIF89a", "image/gif", None, "it returned 'image/gif'"),
}


@pytest.mark.parametrize("page", HOSTILE_PAGES)
def test_a_hostile_page_is_one_line_that_says_why(page: str, index: Served) -> None:
    *answer, why = HOSTILE_PAGES[page]
    index.instead = tuple(answer)

    done = run("wheel", "pick", index.address, *MACHINE)

    assert (done.returncode, done.stderr.count("✗")) == (2, 1), done.stderr[-500:]
    assert why in done.stderr


@pytest.mark.parametrize("digest", [f"md5={'0' * 32}", f"sha512={'0' * 128}", f"SHA256={'0' * 64}"])
def test_every_digest_that_an_index_gives_is_compared(digest: str, index: Served) -> None:
    index.instead = (f'<a href="/deepspeed/{NAME}#{digest}">{NAME}</a>'.encode(), "text/html", None)

    done = run("wheel", "pick", index.address, *MACHINE)

    assert done.returncode == 1
    assert "its index says" in done.stdout


def test_pip_is_bound_to_what_was_judged(index: Served) -> None:
    content = (index.folder / "deepspeed" / NAME).read_bytes()
    index.instead = (f'<a href="/deepspeed/{NAME}">{NAME}</a>'.encode(), "text/html", None)

    done = run("wheel", "pick", index.address, *MACHINE)

    assert f"#sha256={sha256(content).hexdigest()}" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("place", ["s3://u:{}@h/x?k={}", "git+https://u:{}@h/x", "https:/u:{}@h/x", "http://u:{}@["])
def test_an_address_of_another_kind_is_refused_without_its_secrets(place: str) -> None:
    done = run("wheel", "pick", place.replace("{}", TOKEN), *MACHINE)

    assert (done.returncode, TOKEN in done.stdout + done.stderr) == (2, False)
