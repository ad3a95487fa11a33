"""`dsdoctor config`: what it is given, how it ends, what it writes."""

import base64
import json
from pathlib import Path

import pytest

from tests.cli.runner import run
from tests.each import each

BAD = """{
  // the sizes
  "train_batch_size": 8,
  "zero_optimisation": {"stge": 2},  # misspelt twice
  "steps_per_print": "10"
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(BAD)
    return path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.json"], "nothing.json is not a DeepSpeed configuration: No such file"),
        (["{file}", "--hf", "nothing.json"], "--hf nothing.json does not exist"),
        (["{file}", "--accelerate", "nothing.yaml"], "--accelerate nothing.yaml does not exist"),
        (["{file}", "--model", "nothing"], "--model nothing does not exist"),
        (["{file}", "--gpus", "many"], "--gpus 'many' is not a number"),
        (["{file}", "--world", "0"], "--world"),
        (["{file}", "--fix", "{file}"], "is the input file"),
        (["{file}", "--fix", "nowhere/out.json"], "there is no folder"),
        ([base64.b64encode(b"[1, 2, 3, 4]").decode()], "is not a DeepSpeed configuration"),
        ([base64.b64encode(b'{"a": 1, "a": 2}').decode()], "occurs twice"),
        ([base64.b64encode(b'{"a": 1, "%s": 1, "a": 2}' % (b"b" * 3000)).decode()], "occurs twice"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_asked(file: Path, words: list[str], says: str) -> None:
    done = run("config", *(word.format(file=file) if "{file}" in word else word for word in words))

    assert done.returncode == 2
    assert says in done.stderr


@each("option, most", [("--hf", 1), ("--accelerate", 1), ("--model", 64)])
def test_a_file_beside_it_that_is_too_large_is_handed_to_nobody(
    option: str, most: int, file: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as made:
        made.truncate((most << 20) + 1)

    done = run("config", str(file), option, str(large))

    assert (done.returncode, done.stderr.count("✗")) == (2, 1)
    assert f"{option} {large} is larger than {most} MiB" in done.stderr


@pytest.mark.launch
def test_a_file_is_judged_and_corrected_to_the_end(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    before = run("config", str(file), "--json")
    document = json.loads(before.stdout)
    fixed = run("config", str(file), "--fix", str(out))

    assert (before.returncode, document["command"], document["effective"]["stage"]) == (1, "config", 0)
    assert [finding["rule"] for finding in document["findings"]] == ["config-key-misspelt", "config-value-type"]
    assert document["corrections"][0]["to"] == ["zero_optimization"]
    assert (fixed.returncode, file.read_text()) == (0, BAD)
    assert out.read_text() == BAD.replace("optimisation", "optimization").replace("stge", "stage").replace('"10"', "10")
    assert "✓ DeepSpeed" in fixed.stdout and "ZeRO stage 2" in fixed.stdout
