"""A DeepSpeed that computes batch sizes itself, as releases before 0.19 do for elastic training: none is missed, none is added."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsdoctor.core.host import CHILD_SCRIPTS

DEEPSPEED = """
class DeepSpeedConfig:
    def __init__(self, config):
        sizes = [name for name in ("train_batch_size", "train_micro_batch_size_per_gpu") if name in config]
        elastic = config.get("elasticity", {}).get("enabled", False)
        if elastic and sizes:
            raise RuntimeError("batch related parameters *will not be used* since elastic training is enabled")
        if not elastic and not sizes:
            raise AssertionError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
"""
SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import config_keys
made, found = config_keys.judge(json.loads(sys.argv[3]), {})
print(json.dumps([made is not None, [each["kind"] for each in found]]))
"""


def judged(place: Path, config: dict[str, Any]) -> Any:
    package = place / "deepspeed" / "runtime"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "config.py").write_text(DEEPSPEED)
    command = [sys.executable, "-c", SCRIPT, str(CHILD_SCRIPTS), str(place), json.dumps(config)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_batch_sizes_that_elastic_training_computes_are_neither_missed_nor_added(tmp_path: Path) -> None:
    on, off = {"elasticity": {"enabled": True}}, {"elasticity": {"enabled": False}}

    assert judged(tmp_path, on) == [True, []]
    assert judged(tmp_path, off) == [True, ["no batch size"]]
    assert judged(tmp_path, {**off, "train_batch_size": 8}) == [True, []]
    _, refused = judged(tmp_path, {**on, "train_batch_size": 8})
    assert refused == ["RuntimeError"]
