"""CI's own files: the rule that workflows keep (``ci/lint --rule``), and the manner of the scripts in ``ci/``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted(path for path in (ROOT / "ci").iterdir() if path.is_file() and path.read_bytes().startswith(b"#!"))
SHA = "3d3c42e5aac5ba805825da76410c181273ba90b1"


def run(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """One script of ``ci/``, from a folder that is not the checkout's."""
    argv = [str(ROOT / "ci" / script), *map(str, arguments)]
    return subprocess.run(argv, cwd="/", env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


def test_our_workflows_name_commits_and_call_scripts_of_ci_only():
    assert WORKFLOWS
    told = run("lint", "--rule", *WORKFLOWS)

    assert (told.returncode, told.stdout) == (0, "")


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


def test_lint_names_the_tools_that_are_not_there_and_the_way_to_them(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    told = run("lint", PATH=str(tmp_path), PYTHON="python-of-nowhere")

    assert (told.returncode, told.stdout) == (2, "")
    assert "python-of-nowhere: shellcheck hadolint check-jsonschema zizmor" in told.stderr
    assert '$ python -m pip install -e ".[ci]"' in told.stderr


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
