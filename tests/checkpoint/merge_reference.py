"""Is a merged model bit-equal to what zero_to_fp32 makes of the checkpoint? A script of its own: it imports torch, DeepSpeed.

``merge_reference.py FOLDER MERGED fp32|bf16`` prints the names that differ, and those that only the merged model has, as JSON.
With ``model`` in place of a type it is compared with the model's own files, rounded to their types: of experts and pipelines, which
zero_to_fp32 does not know.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file


def main() -> None:
    answers = []
    for folder, merged, dtype in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        made: dict[str, torch.Tensor] = {}
        for path in sorted(Path(merged).glob("*.safetensors")):
            made.update(load_file(path))
        if dtype == "model":
            answers.append(rounded(Path(folder) / "global_step2", made))
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            reference = get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2")
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        wanted = {name: each.to(kind) if each.is_floating_point() else each for name, each in reference.items()}
        differ = [name for name, each in wanted.items() if name not in made or not same(made[name], each)]
        answers.append({"compared": len(wanted), "differ": differ, "more": sorted(set(made) - set(wanted))})
    print(json.dumps(answers))


def rounded(tag: Path, made: dict[str, torch.Tensor]) -> dict[str, object]:
    wanted: dict[str, torch.Tensor] = {}
    for path in tag.glob("*model_states.pt"):
        layer = re.match(r"layer_(\d+)-", path.name)
        # a checkpoint of our own test: the file is trusted
        content = torch.load(path, weights_only=False)
        found = content if path.name.startswith("layer_") else content["module"] or {}
        wanted.update({f"{int(layer[1])}.{name}" if layer else name: each for name, each in found.items()})
    differ = [name for name, each in wanted.items() if name not in made or not same(made[name].to(each.dtype), each)]
    exact = [name for name, each in made.items() if each.dtype == torch.float32 and same(each.bfloat16().float(), each)]
    return {"compared": len(wanted), "differ": differ, "more": sorted(set(made) - set(wanted)), "rounded": exact}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


if __name__ == "__main__":
    main()
