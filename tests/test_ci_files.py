"""CI's own files: the rule that workflows keep (``ci/lint --rule``), and the manner of the scripts in ``ci/``."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted(path for path in (ROOT / "ci").iterdir() if path.is_file() and path.read_bytes().startswith(b"#!"))
QUICK = f"{Path(sys.executable).parent}:/usr/bin:/bin"
"""A PATH whose python3 starts at once: that of a version manager does not."""

SHA = "3d3c42e5aac5ba805825da76410c181273ba90b1"


def run(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """One script of ``ci/``, from a folder that is not the checkout's."""
    argv = [str(ROOT / "ci" / script), *map(str, arguments)]
    return subprocess.run(argv, cwd="/", env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


def test_our_workflows_name_commits_and_call_scripts_of_ci_only():
    assert WORKFLOWS
    told = run("lint", "--rule", *WORKFLOWS)

    assert (told.returncode, told.stdout) == (0, "")


@cache
def jobs() -> dict[str, dict[str, Any]]:
    """Every job of every workflow."""
    read = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    return {f"{name}: {job}": one for name, workflow in read.items() for job, one in workflow["jobs"].items()}


def test_just_the_jobs_that_attest_may_sign():
    attest = {
        name
        for name, job in jobs().items()
        for step in job["steps"]
        if "attest-build-provenance@" in step.get("uses", "")
    }
    may = {"id-token": "write", "attestations": "write"}
    identified = {"publish: pypi": {"id-token": "write"}, "docs: deploy": {"id-token": "write", "pages": "write"}}

    assert attest == {"wheels: attest", "image: publish"}
    for name, job in jobs().items():
        given = job.get("permissions", {})
        if name in identified:
            assert given == identified[name]
            continue
        assert {key: given[key] for key in may if key in given} == (may if name in attest else {})
    assert all("\npermissions:\n  contents: read\n\n" in path.read_text() for path in WORKFLOWS)


def test_a_job_with_an_identity_that_publishes_runs_no_script_and_only_for_what_was_merged():
    for name, uses in (("publish: pypi", "pypa/gh-action-pypi-publish@"), ("docs: deploy", "actions/deploy-pages@")):
        job = jobs()[name]
        assert [step for step in job["steps"] if "run" in step] == []
        assert job["steps"][-1]["uses"].startswith(uses)
        assert (job["needs"], "environment" in job) == ("build", True)
    assert jobs()["docs: deploy"]["if"] == "${{ github.event_name == 'push' }}"
    tags = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())[True]
    assert tags == {"push": {"tags": ["v*"]}}


def test_a_package_is_built_for_its_own_tag_alone():
    told = run("build-package", "--tag", "v0.0.1", PATH=QUICK)

    assert (told.returncode, told.stdout) == (1, "")
    assert "the tag is v0.0.1, the version " in told.stderr


def test_what_is_signed_is_what_was_tested_or_pushed():
    wheels, image = (
        next(step["with"] for step in jobs()[name]["steps"] if "attest" in step.get("uses", ""))
        for name in ("wheels: attest", "image: publish")
    )
    push = next(step["id"] for step in jobs()["image: publish"]["steps"] if "--push" in step.get("run", ""))

    assert jobs()["wheels: attest"]["needs"] == "test"
    assert wheels == {"subject-path": "dist/*.whl"}
    assert image["subject-digest"] == f"${{{{ steps.{push}.outputs.digest }}}}"


def test_every_base_image_is_named_by_digest_and_the_bot_finds_it():
    bot = json.loads((ROOT / ".github" / "renovate.json").read_text())
    (manager,) = bot["customManagers"]
    (pattern,) = (match.replace("(?<", "(?P<") for match in manager["matchStrings"])
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    bases = re.findall(r"\bbase: (\S+)\n", workflow)

    assert len(bases) == len(jobs()["wheels: build"]["strategy"]["matrix"]["include"])
    assert [f"{m['depName']}:{m['currentValue']}@{m['currentDigest']}" for m in re.finditer(pattern, workflow)] == bases
    assert re.search(r"^ARG BASE_IMAGE=docker\.io/library/python:\S+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    assert "dockerfile" in bot["enabledManagers"]
    # one tag, one digest
    assert len({base.partition("@")[0] for base in bases}) == len(set(bases))


def attestation(*wheels: Path) -> str:
    """A bundle over wheels, as the action writes it."""
    subjects = [
        {"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}} for path in wheels
    ]
    payload = json.dumps({"_type": "https://in-toto.io/Statement/v1", "subject": subjects}).encode()
    return json.dumps({"dsseEnvelope": {"payload": base64.b64encode(payload).decode()}})


def test_an_attestation_is_put_beside_each_wheel_that_it_attests_and_beside_no_other(tmp_path):
    folder, bundle = tmp_path / "dist", tmp_path / "bundle"
    folder.mkdir()
    wheels = [folder / f"deepspeed-{number}.whl" for number in range(3)]
    for number, wheel in enumerate(wheels):
        wheel.write_bytes(bytes([number]))

    bundle.write_text(attestation(*wheels[:2]))
    told = run("keep-attestation", folder, bundle, PATH=QUICK)
    assert told.returncode == 1
    assert "attests nothing of deepspeed-2.whl" in told.stderr
    assert not list(folder.glob("*.json"))

    bundle.write_text(f"{attestation(*wheels[:2])}\n{attestation(wheels[2])}\n")
    told = run("keep-attestation", folder, bundle, PATH=QUICK)
    assert told.returncode == 0
    assert {path.read_text() for path in folder.glob("*.whl.sigstore.json")} == {bundle.read_text()}
    assert len(list(folder.glob("*.whl.sigstore.json"))) == 3


@pytest.mark.parametrize(
    "step",
    [
        "- uses: actions/checkout@v7",
        f"- uses: actions/checkout@{SHA}",
        f"- uses: actions/checkout@{SHA} # v7",
        f"- uses: actions/checkout@{SHA[:-1]} # v7.0.1",
        f'- "uses": actions/checkout@{SHA} # v7.0.1',
        "- uses: ./.github/actions/own",
        "- run: pytest",
        "- run: ci/check && curl example.org",
        "- run: ci/check $(id)",
        "- run: ci/check ${{ github.ref_name }}",
        "- run: |",
        "- {run: ci/check}",
        "- name: split\n        run: ci/check\n          --fresh",
        "- run: ci/../evil",
    ],
)
def test_a_step_that_breaks_the_rule_is_told_with_its_line(tmp_path, step):
    workflow = tmp_path / "bad.yml"
    workflow.write_text(f"jobs:\n  job:\n    steps:\n      - run: ci/check\n      # - run: id\n      {step}\n")
    told = run("lint", "--rule", workflow)

    assert told.returncode == 1
    assert f"{workflow}:{6 + step.count(chr(10))}: " in told.stdout


@pytest.mark.parametrize(
    "step", [f"- uses: docker/login-action@{SHA} # v4.1.0", '- run: ci/build-image --arch "$ARCH"']
)
def test_a_step_that_keeps_the_rule_is_let_through(tmp_path, step):
    workflow = tmp_path / "good.yml"
    workflow.write_text(f"steps:\n  {step}\n    env:\n      ARCH: 9.0\n")

    assert run("lint", "--rule", workflow).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_prints_its_help(script):
    told = run(script.name, "--help")

    assert (told.returncode, told.stderr) == (0, "")
    assert f"ci/{script.name}" in told.stdout


ASKED_BY = {
    "lint": r"^ci = (\[.*\])$",
    "package": r"^requires = (\[.*\])$",
    "package-trial": r"^dependencies = (\[[^\]]*\])$",
    "check": r"^test = (\[(?:[^\]]|\[json-validation\]|\[plot,hang,mcp\])*\])$",
}


@pytest.mark.parametrize("name", ASKED_BY)
def test_what_ci_and_a_release_install_has_a_version_and_a_sha256(name):
    (told,) = re.findall(ASKED_BY[name], (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    told = re.sub(r" *#.*", "", told)
    asked = {re.split(r"[>=\[;]", tool)[0].lower() for tool in re.findall(r'"([^"]+)"', told)} - {"dsdoctor", "torch"}
    lines = (ROOT / "ci" / f"{name}-requirements.txt").read_text().replace("\\\n", " ").splitlines()[1:]

    assert asked
    assert [line for line in lines if not re.match(r"[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []
    assert asked <= {line.partition("==")[0] for line in lines}


@pytest.mark.parametrize("script", ["build-package", "check"])
def test_what_decides_a_release_fetches_nothing_but_by_sha256(script):
    """Only torch, whose CPU builds PyPI has not, is fetched by its version."""
    text = (ROOT / "ci" / script).read_text()
    installs = re.findall(r"^ *\S*python\S* -m pip install (.*)$", text, re.MULTILINE)
    hashed = [line for line in installs if "--require-hashes" in line]

    assert hashed
    assert [
        line for line in installs if line not in hashed and "--no-index" not in line and "^torch==" not in line
    ] == []
    assert ["--no-index --no-build-isolation" in line for line in text.splitlines() if "readme%%" in line] == (
        [True] if script == "check" else []
    )
    assert len(re.findall(r"-m build(?! --no-isolation)", text)) == 0


def test_equal_content_makes_equal_bytes_of_a_source_distribution(tmp_path):
    made = []
    for number in (1, 2):
        source, target = tmp_path / f"from{number}", tmp_path / f"to{number}"
        source.mkdir(), target.mkdir()
        with tarfile.open(source / "x-1.tar.gz", "w:gz") as file:
            for name in ("x-1/a", "x-1/b")[:: 1 if number == 1 else -1]:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid, member.uname = 1, number, number, f"user{number}"
                member.mode = 0o644 if number == 1 else 0o664
                file.addfile(member, io.BytesIO(b"x"))
        argv = [sys.executable, ROOT / "ci" / "repack_sdist.py", source / "x-1.tar.gz", target]
        subprocess.run(argv, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}, timeout=60)
        made.append((source / "x-1.tar.gz", target / "x-1.tar.gz"))

    (before, after), (before_other, after_other) = made
    assert before.read_bytes() != before_other.read_bytes()
    assert after.read_bytes() == after_other.read_bytes()
    with tarfile.open(after) as file:
        assert [(each.name, each.mtime, each.uid, each.mode) for each in file] == [
            ("x-1/a", 1700000000, 0, 0o644),
            ("x-1/b", 1700000000, 0, 0o644),
        ]


@pytest.mark.slow
def test_a_release_is_built_twice_alike_sealed_and_then_tried(tmp_path):
    """With the real tools: ci/build-package compares two builds byte for byte and refuses what differs."""
    committed = ["git", "log", "-1", "--format=%ct"]
    epoch = subprocess.run(committed, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    argv = [ROOT / "ci" / "build-package", "--out", tmp_path / "dist"]
    done = subprocess.run(
        argv, cwd="/", env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=1200
    )

    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted((tmp_path / "dist").iterdir())
    assert [path.suffix for path in files] == [".gz", ".whl"] or [path.suffix for path in files] == [".whl", ".gz"]
    for path in files:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in done.stdout
    with tarfile.open(next(path for path in files if path.suffix == ".gz")) as file:
        assert {member.mtime for member in file} == {int(os.environ.get("SOURCE_DATE_EPOCH", epoch))}


def test_what_copies_the_package_to_build_it_takes_all_that_its_wheel_holds():
    text = (ROOT / "pyproject.toml").read_text()
    (section,) = re.findall(r"^\[tool\.setuptools\.data-files\]\n((?:.+\n)+)", text, re.MULTILINE)
    folders = set(re.findall(r'\["(\w+)/', section))
    places = (ROOT / "docker/Dockerfile", *(path for path in (ROOT / "ci").iterdir() if path.is_file()))
    copying = {
        path.name: "\n".join(line for line in path.read_text().splitlines() if re.match(r"\s*(COPY|cp -R) ", line))
        for path in places
    }

    lacking = [
        (name, each)
        for name, said in copying.items()
        if "pyproject.toml" in said
        for each in folders
        if each not in said
    ]
    assert folders == {"completions"}
    assert {name for name, said in copying.items() if "pyproject.toml" in said} == {
        "Dockerfile",
        "move-pins",
        "test-wheels",
    }
    assert lacking == []


def test_lint_names_the_tools_that_are_not_there_and_the_way_to_them(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    told = run("lint", PATH=str(tmp_path), PYTHON="python-of-nowhere")

    assert (told.returncode, told.stdout) == (2, "")
    assert "python-of-nowhere: shellcheck hadolint check-jsonschema zizmor" in told.stderr
    assert '$ python -m pip install -e ".[ci]"' in told.stderr


@pytest.mark.slow
def test_wheels_of_another_python_are_skipped_and_that_is_no_success(tmp_path):
    wheel = tmp_path / "deepspeed-1-cp399-cp399-linux_x86_64.whl"
    wheel.write_bytes(b"")
    Path(f"{wheel}.json").write_text('{"python": "cp399", "platform": "linux-x86_64", "torch": "9.9", "ops": []}')
    told = run("test-wheels", tmp_path, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))

    assert told.returncode == 1
    assert "| skipped: no Python of cp399 and linux-x86_64 here |" in told.stdout
    assert (tmp_path / "summary.md").read_text() == told.stdout
    assert "none of these wheels could be tested" in told.stderr


def test_a_wheel_without_its_manifest_is_not_good(tmp_path):
    (tmp_path / "deepspeed-1-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    told = run("test-wheels", tmp_path, GITHUB_STEP_SUMMARY="")

    assert told.returncode == 1
    assert "| ✗ no manifest beside it that can be read |" in told.stdout


@pytest.mark.parametrize("arguments", [(), ("/nowhere",), ("/", "--nonsense"), ("/", "--index")])
def test_a_senseless_call_of_test_wheels_is_told_as_such(arguments):
    told = run("test-wheels", *arguments)

    assert (told.returncode, told.stdout) == (2, "")
    assert "ci/test-wheels --help" in told.stderr
