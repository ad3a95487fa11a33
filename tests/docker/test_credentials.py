"""A login or a token never becomes a build argument: docker/credentials, ci/build-image and docker/step refuse it."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-0f-the-private-index"
TOKENS = (
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2" * 9,
    "glpat-" + "a1B2" * 5,
    "hf_" + "a1B2" * 8,
    "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 9,
    "AKIA" + "Q1W2" * 4,
)
LOGINS = (
    f"https://user:{SECRET}@host.example/simple",
    f"HTTPS://{SECRET}@host.example/simple/",
    f"http://__token__:{SECRET}@host.example:8443/simple",
    f"https://user%40company:{SECRET}@host.example",
    f"https://:{SECRET}@host.example/simple",
    f"https://user:sl/ash-{SECRET}@host.example/simple",
    f"https://user:{SECRET}@[2001:db8::1]:8443/simple",
)
QUERIES = (
    f"https://host.example/simple?token={SECRET}",
    f"https://host.example/simple/?sv=2024&sig={SECRET}",
    f"https://host.example/simple?{SECRET}",
    f"https://host.example/simple#access_token={SECRET}",
)
PUBLIC = (
    "",
    "https://download.pytorch.org/whl/cu126",
    "http://[2001:db8::1]:3128",
    "http://proxy.example:3128",
    "localhost,127.0.0.1,.example",
    "git+https://github.com/deepspeedai/DeepSpeed@v0.19.8",
    "git+https://github.com/deepspeedai/DeepSpeed.git@" + "0f" * 20 + "#egg=deepspeed",
    "git+https://host.example:8443/a/DeepSpeed@feature/secret#subdirectory=sub&egg=deepspeed",
    "git+ssh://git@github.com/deepspeedai/DeepSpeed@master",
    "git@github.com:deepspeedai/DeepSpeed.git",
    "docker.io/library/python:3.12-slim-bookworm@sha256:" + "0f" * 32,
    "registry.example:5000/team/base:tag",
    "2.13.0+cu126",
    "8.0;8.6;9.0+PTX",
    "cpu_adam,fused_adam",
    "--no-cache",
    "id=token,src=/home/user/token",
    "/srv/wheels:/run/wheels:ro",
)


def kinds(*values: str) -> list[str]:
    """What docker/credentials says of each value."""
    argv, text = [str(ROOT / "docker" / "credentials")], "".join(f"{value}\n" for value in values)
    told = subprocess.run(argv, input=text, capture_output=True, text=True, check=True, timeout=60)
    assert SECRET not in told.stdout + told.stderr
    return told.stdout.split("\n")[:-1]


def test_each_login_query_and_token_is_told_in_each_place_where_it_can_stand() -> None:
    places = (
        "{}",
        "--extra-index-url={}",
        "PIP_INDEX_URL={}",
        "git+{}",
        "first second {} last",
        "https://public.example {}",
    )
    in_paths = tuple(f"https://host.example/{token}/simple" for token in TOKENS)
    values = [place.format(value) for place, value in itertools.product(places, (*LOGINS, *QUERIES, *in_paths))]
    values += [
        f"{name}={SECRET}" for name in ("HF_TOKEN", "PIP_PASSWORD", "my_secret", "AWS_SECRET_ACCESS_KEY", "API_KEY")
    ]

    assert [value for value, kind in zip(values, kinds(*values), strict=True) if not kind] == []


def test_what_is_no_credential_is_let_through() -> None:
    values = [*PUBLIC, *(f"TORCH_INDEX={value}" for value in PUBLIC)]

    assert [value for value, kind in zip(values, kinds(*values), strict=True) if kind] == []


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose docker writes down that it was called, and builds nothing."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path}/called\n[ "$2" != build ]\n')
    docker.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, "PATH": f"{docker.parent}:/usr/bin:/bin", "CALLED": str(tmp_path / "called")}


def build(environment: dict[str, str], *options: str, **variables: str) -> tuple[int, str, str]:
    """ci/build-image -> its exit status, what it said, and the arguments that docker was called with."""
    argv = [str(ROOT / "ci" / "build-image"), "--engine", "docker", *options]
    done = subprocess.run(argv, cwd="/", env={**environment, **variables}, capture_output=True, text=True, timeout=60)
    called = Path(environment["CALLED"])
    return done.returncode, done.stdout + done.stderr, called.read_text() if called.exists() else ""


PROXY = f"http://user:{SECRET}@proxy.example:3128"
REFUSED = {
    "index": (("--index", LOGINS[0]), {}, "--pip-conf"),
    "index without a scheme": (("--index", f"user:{SECRET}@host.example/simple"), {}, "--pip-conf"),
    "query": (("--index", QUERIES[1]), {}, "--pip-conf"),
    "deepspeed": (
        ("--deepspeed", f"git+https://{SECRET}@github.com/a/DeepSpeed@v1"),
        {},
        "a repository that needs no login",
    ),
    "token in another option": (("--base", f"host.example/{TOKENS[0]}/base"), {}, "--secret"),
    "argument": (("--", "--build-arg", f"PIP_INDEX_URL={LOGINS[1]}"), {}, "--pip-conf"),
    "argument by =": (("--", f"--build-arg=HF_TOKEN={SECRET}"), {}, "--secret"),
    "argument of the environment": (
        ("--", "--build-arg", "PIP_EXTRA_INDEX_URL"),
        {"PIP_EXTRA_INDEX_URL": LOGINS[0]},
        "--pip-conf",
    ),
    "argument of the environment by =": (("--", "--build-arg=HF_TOKEN"), {"HF_TOKEN": SECRET}, "--secret"),
    "proxy as an argument": (("--", "--build-arg", f"https_proxy={PROXY}"), {}, "--proxy"),
    "proxy": ((), {"https_proxy": PROXY}, "--proxy"),
    "proxy without a scheme": ((), {"HTTP_PROXY": f"user:{SECRET}@proxy.example:3128"}, "--proxy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_credential_is_refused_before_the_engine_is_called_and_is_not_repeated(
    engine: dict[str, str], case: str
) -> None:
    options, variables, way = REFUSED[case]

    status, told, called = build(engine, *options, **variables)

    assert (status, called) == (2, "")
    assert way in told.partition("Fix: ")[2]
    assert not [token for token in (SECRET, *TOKENS) if token in told]


def test_public_values_reach_the_engine_and_secrets_only_as_files(engine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "proxy").write_text(f"https_proxy={PROXY}\n")
    given = ("--index", PUBLIC[1], "--deepspeed", PUBLIC[6], "--base", PUBLIC[10], "--proxy", str(tmp_path / "proxy"))

    # the engine's own way out is the variable, which is then no argument
    status, _, called = build(engine, *given, https_proxy=PROXY)

    assert status == 1
    assert {f"TORCH_INDEX={PUBLIC[1]}", f"DEEPSPEED_VERSION={PUBLIC[6]}", f"BASE_IMAGE={PUBLIC[10]}"} <= set(
        called.split("\n")
    )
    assert f"id=proxy,src={tmp_path}/proxy" in called.split("\n")
    assert SECRET not in called
    assert "https_proxy" not in called


def test_a_build_that_was_started_without_the_script_stops_before_pip(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\n: >{tmp_path}/called\n")
    pip.chmod(0o755)
    argv = ["sh", str(ROOT / "docker" / "step"), "pip", "install", "--extra-index-url", LOGINS[0], "torch"]
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert done.stderr.startswith("✗ an argument of pip holds a login")
    assert SECRET not in done.stderr + done.stdout
    assert not (tmp_path / "called").exists()
