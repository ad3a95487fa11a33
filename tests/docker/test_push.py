"""ci/build-image --push: which name and digest the next step attests. The engine is one that writes the files that docker would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0f" * 32
MANIFEST = (
    '{"version": "1", "dsdoctor": "1", "torch": "1", "accelerator": "cpu", "nvidia": null, "ops": [], "python": "cp312",'
    ' "plan": {"processor": "native"}, "cpu_flags": [], "wheel": "w", "sha256": "0"}'
)
DOCKER = f"""#!/bin/sh
for word in "$@"; do
    case "$word" in
        type=local,dest=*)
            mkdir -p "${{word#*dest=}}"
            : >"${{word#*dest=}}/deepspeed-1.whl"
            echo '{MANIFEST}' >"${{word#*dest=}}/deepspeed-1.whl.json" ;;
        */pushed) echo '{{"containerimage.digest": "{DIGEST}"}}' >"$word" ;;
    esac
done
"""


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("ghcr.io/Owner/dsdoctor:v1-cuda", "ghcr.io/owner/dsdoctor"),
        pytest.param(*["registry.example:5000/team/dsdoctor"] * 2, marks=pytest.mark.slow),
    ],
)
def test_a_push_tells_the_next_step_the_repository_and_the_digest(tmp_path: Path, tag: str, name: str) -> None:
    docker, outputs = tmp_path / "docker", tmp_path / "outputs"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "GITHUB_OUTPUT": str(outputs),
    }
    argv = [str(ROOT / "ci" / "build-image"), "--engine", "docker", "--push", "--tag", tag]
    done = subprocess.run(argv, cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert f"pushed: {name}@{DIGEST}\n" in done.stdout
    assert outputs.read_text() == f"name={name}\ndigest={DIGEST}\n"
