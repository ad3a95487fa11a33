"""A model -> its parameters, and what lives beside them through one forward and one backward pass. One argument: a JSON object.

The model runs under FakeTensorMode: shapes and dtypes go through every operation, no number does, so neither a GPU nor the
memory is needed. ``model``: a Hugging Face configuration (a JSON file, a folder that has config.json, or its fields), or
file.py:function, a function without arguments that returns a module, or a module and the keyword arguments of its forward.
``runs``: for each (batch, sequence, checkpointing) one timeline is told, two where the GPU's kernel for attention decides. A
sequence that is null is as long as the model takes, 2,048 tokens at most.

An event is [kind, index, most, now]: bytes beside parameters, the most since the event before and now.
"""

import contextlib
import difflib
import io
import json
import logging
import os
import re
import resource
import sys
import time

sys.dont_write_bytecode = True
import model_run  # noqa: E402


def configuration_of(path):
    """A Hugging Face configuration of a file, a folder, or its fields. Nothing is fetched, no code of the folder is run."""
    import transformers

    fields = dict(path) if isinstance(path, dict) else read_fields(path)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ValueError("the file has no model_type: it is no configuration of Hugging Face")
    if fields.get("auto_map"):
        raise ValueError("it brings code of its own (auto_map), which is not run: name file.py:function instead")
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        raise Unknown(kind)
    return transformers.AutoConfig.for_model(kind, **fields)


def read_fields(path):
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    with open(file, encoding="utf-8") as stream:
        return json.load(stream)


class Unknown(ValueError):
    """A model_type that the installed transformers does not have."""

    def __init__(self, kind):
        import transformers

        near = difflib.get_close_matches(str(kind), list(transformers.models.auto.configuration_auto.CONFIG_MAPPING), 3)
        meant = ": did you mean %s?" % " or ".join(near) if near else ""
        super().__init__("transformers %s has no model_type %r%s" % (transformers.__version__, str(kind)[:60], meant))
        self.hint = (
            "correct model_type, name an environment whose transformers has it (--python), or a function that makes "
            "the model (file.py:function)"
        )


def class_of(config):
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for table in (
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    ):
        mapping = getattr(transformers, table)
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError("the configuration names no architecture that this transformers has")


def inputs_of(model, config, batch, sequence):
    """Inputs of one micro batch with labels, as shapes."""
    import torch

    size = getattr(config, "image_size", None)
    if model.main_input_name == "pixel_values" and size:
        side = size if isinstance(size, int) else size[0]
        pixels = torch.zeros(
            batch, getattr(config, "num_channels", 3), side, side, dtype=next(model.parameters()).dtype
        )
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    whole = any(part in type(model).__name__ for part in ("LM", "Generation", "Pretraining", "PreTraining"))
    return {"input_ids": ids, "labels": ids.clone() if whole else torch.zeros(batch, dtype=torch.long)}


def from_python(place):
    import importlib.util

    file, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("dsdoctor_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dsdoctor_model"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    made = getattr(module, name)()
    return made if isinstance(made, tuple) else (made, None)


def build(wish):
    import torch

    place = wish["model"]
    if isinstance(place, str) and ":" in os.path.basename(place) and place.partition(".py:")[2].isidentifier():
        model, inputs = from_python(place)
        config = getattr(model, "config", None)
    else:
        config = configuration_of(place)
        config.use_cache = False
        for name in ("pad_token_id", "decoder_start_token_id"):
            # which token it is takes no memory, and that there is none stops some models
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
        if wish.get("attention"):
            config._attn_implementation = wish["attention"]
        if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
            # experts that a loop visits depend on numbers, and there are none here
            config._experts_implementation = wish.get("experts") or "grouped_mm"
        model, inputs = class_of(config)(config), None
    if wish["dtype"] != "bfloat16":
        grouped_without_kernel()
    dtype = getattr(torch, wish["dtype"])
    for parameter in model.parameters():
        # as DeepSpeedEngine._cast_module_mixed_precision: parameters are cast, buffers stay
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.train(), config, inputs


def grouped_without_kernel():
    """torch's grouped product has no shapes-only form but for bf16: transformers' own stands in, which has one."""
    with contextlib.suppress(ImportError):
        from transformers.integrations import moe

        if hasattr(moe, "_can_use_grouped_mm"):
            moe._can_use_grouped_mm = lambda *_: False


def faked(mode, wish):
    """The model with fake tensors. What asks a tensor for its number while it is made (a schedule of drop paths) is made on
    the meta device first, where tensors that name the CPU as their device are real."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        with mode, converting_in_place():
            return build(wish)
    except DataDependentOutputException:
        with torch.device("meta"):
            made = build(wish)
    copies = {}
    with mode:
        for module in made[0].modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = copies.setdefault(id(tensor), fake_like(tensor))
    return made


@contextlib.contextmanager
def converting_in_place():
    """Modules that are converted while they are made, as adapters are (``module.to(dtype)``): torch swaps fake tensors for
    that, and cannot where anything else refers to one."""
    import torch

    usual = torch.nn.Module._apply

    def converted(module, function, recurse=True):
        for child in module.children() if recurse else ():
            child._apply(function)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = function(parameter.data)
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else function(buffer)
        return module

    torch.nn.Module._apply = converted
    try:
        yield
    finally:
        torch.nn.Module._apply = usual


def fake_like(tensor):
    import torch

    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


USUAL_SEQUENCE = 2048
"""Tokens of a sample where nobody says how many."""
POSITIONS = re.compile(r"(^|[._])(w?pe|embed_positions|pos\w*)$")


def positions_of(model, config):
    """(tokens that the model has positions for, whether they are rows of a table); (None, False) where nothing tells."""
    import torch

    tables = [
        module.num_embeddings
        - getattr(module, "offset", 0)
        - (module.padding_idx + 1 if module.padding_idx is not None else 0)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and POSITIONS.search(name)
    ]
    if tables:
        return min(tables), True
    limit = getattr(config, "max_position_embeddings", None)
    return (limit, False) if isinstance(limit, int) and limit > 0 else (None, False)


def described(model, owners):
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    return {
        "parameters": [[name, p.numel(), int(p.requires_grad)] for name, p in model.named_parameters()],
        "modules": [
            {
                "name": name,
                "parameters": [numbers[id(p)] for p in module.parameters(recurse=False)],
            }
            for name, module in owners
        ],
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    }


def answer(wish):
    from torch._subclasses.fake_tensor import FakeTensorMode

    started = time.monotonic()
    mode = FakeTensorMode()
    model, config, given = faked(mode, wish)
    positions, table = positions_of(model, config)
    usual = min(USUAL_SEQUENCE, positions or USUAL_SEQUENCE)
    runs = [(batch, usual if sequence is None else sequence, how) for batch, sequence, how in wish["runs"]]
    with mode:
        owners = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        result = {
            **described(model, owners),
            "positions": positions,
            "position_table": table,
            "class": type(model).__name__,
            "attention": str(getattr(config, "_attn_implementation", "")),
            "hidden_size": getattr(config, "hidden_size", None) or getattr(config, "d_model", None),
        }
        with contextlib.suppress(Exception):  # what cannot run is told with its run
            batch, sequence, _ = runs[0]
            inputs = of(model, config, given, batch, sequence)
            result["kept"] = model_run.kept_views(model, [m for _, m in owners], inputs)
        result["runs"] = [each for wanted in runs for each in told(model, config, given, owners, wanted)]
    result["seconds"] = time.monotonic() - started
    result["own_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def of(model, config, given, batch, sequence):
    if given is None:
        return inputs_of(model, config, batch, sequence)
    return given(batch, sequence) if callable(given) else given


def told(model, config, given, owners, wanted):
    """The run; where a kernel decides, first as a fused one takes it, then with all scores."""
    batch, sequence, checkpointing = wanted
    result = {"batch": batch, "sequence": sequence, "checkpointing": checkpointing}
    found = []
    for fused in (True, False):
        try:
            inputs = of(model, config, given, batch, sequence)
            attention = model_run.Attention(fused)
            timeline = model_run.run(model, [module for _, module in owners], inputs, checkpointing, attention)
        except Exception as error:
            first = (str(error).strip() or "no reason given").splitlines()[0][:300]
            return [{**result, "error": "%s: %s" % (type(error).__name__, first)}]
        size = sum(each.numel() * each.element_size() for each in inputs.values())
        main = next(iter(inputs.values()))
        shape = {"shape": list(main.shape), "tokens": not main.is_floating_point()}
        found.append({**result, **shape, "events": timeline.events, "logits": timeline.logits, "inputs": size})
        if not attention.decides:
            return found
    return [{**found[0], "attention": "fused"}, {**found[1], "attention": "materialized"}]


def answered(wish):
    """The answer, or why there is none."""
    try:
        return answer(wish)
    except ImportError as error:
        return {"error": str(error), "missing": error.name or "torch"}
    except Unknown as error:
        return {"error": str(error), "hint": error.hint}
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, str(error)[:2000])}


def main():
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        result = answered(json.loads(sys.argv[1]))
    print("DSDOCTOR " + json.dumps(result))


if __name__ == "__main__":
    main()
