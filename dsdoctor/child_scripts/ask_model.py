"""A model -> its parameters, and what lives beside them through one forward and one backward pass. One argument: a JSON object.

The model runs under FakeTensorMode: shapes and dtypes go through every operation, no number does, so neither a GPU nor the
memory is needed. ``model``: a Hugging Face configuration (a JSON file, or a folder that has config.json), or
file.py:function, a function without arguments that returns a module, or a module and the keyword arguments of its forward.
``runs``: for each (batch, sequence, checkpointing) one timeline is told.

An event is [kind, index, most, now]: bytes beside parameters, the most since the event before and now.
"""

import contextlib
import io
import json
import logging
import os
import resource
import sys
import time
import weakref

PRE_FORWARD, POST_FORWARD, LOSS, PRE_BACKWARD, POST_BACKWARD, GRADIENT, END = range(7)


class Storages:
    """Bytes of the storages that operations make, but those that were there before."""

    def __init__(self):
        self.now = self.most = 0
        self.sizes = {}
        self.known = set()

    def know(self, tensor):
        storage = tensor.untyped_storage()
        self.known.add(storage._cdata)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self.sizes and key not in self.known:
            self.sizes[key] = (weakref.ref(storage, lambda _: self.gone(key)), size)
            self.now += size
            self.most = max(self.most, self.now)

    def gone(self, key):
        self.now -= self.sizes.pop(key, (None, 0))[1]


def watching(storages):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    storages.add(leaf)
            return result

    return Watching()


class Timeline:
    """What happens in one step, and the bytes at each point."""

    def __init__(self, storages):
        self.storages = storages
        self.events = []
        self.logits = 0

    def add(self, kind, index):
        self.events.append([kind, index, self.storages.most, self.storages.now])
        self.storages.most = self.storages.now


def identity(timeline, kind, index, ready=lambda: True):
    """An autograd function that changes nothing and tells when the backward pass comes by, as DeepSpeed's ZeRO-3 hooks do
    (runtime/zero/parameter_offload.py, DeepSpeedZeRoOffload._register_deepspeed_module)."""
    import torch

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(_, tensor):
            return tensor.detach()

        @staticmethod
        def backward(_, gradient):
            if ready():
                timeline.add(kind, index)
            return gradient

    return Passing.apply


def each_tensor(value, function):
    """Apply to the tensors of outputs or inputs that need a gradient, in place of them."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(each_tensor(part, function) for part in value)
    return value


def hook(module, index, timeline):
    """Tell when a module that has parameters of its own begins and ends, forward and backward."""
    left = [0]

    def last():
        left[0] -= 1
        return left[0] == 0

    def count(tensor):
        left[0] += 1
        return identity(timeline, POST_BACKWARD, index, last)(tensor)

    def before(_, inputs):
        timeline.add(PRE_FORWARD, index)
        left[0] = 0
        return each_tensor(inputs, count)

    def after(_module, _inputs, output):
        timeline.add(POST_FORWARD, index)
        return each_tensor(output, identity(timeline, PRE_BACKWARD, index))

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def kept_views(model, owners, inputs):
    """Numbers of the parameters of which a view is saved for the backward pass. One that is saved itself can be freed and
    gathered again in its place, a view of it cannot. DeepSpeed gives ZeRO-3 a linear function of its own that saves none."""
    import torch

    numbers = {p.untyped_storage()._cdata: n for n, p in enumerate(model.parameters())}
    themselves = {id(p) for p in model.parameters()}
    linear = {id(p) for module in owners if type(module).__name__ == "Linear" for p in module.parameters(recurse=False)}
    without = {numbers[p.untyped_storage()._cdata] for p in model.parameters() if id(p) in linear}
    found = set()

    def look(tensor):
        number = numbers.get(tensor.untyped_storage()._cdata)
        if number is not None and id(tensor) not in themselves:
            found.add(number)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        model(**inputs)
    return sorted(found - without)


def loss_and_logits(output):
    """The loss of a model's output, one number, and its logits where it names them."""
    import torch

    if isinstance(output, torch.Tensor):
        loss, logits = output, None
    elif isinstance(output, dict):
        loss, logits = output["loss"], output.get("logits")
    else:
        loss, logits = output[0], None
    return loss if loss.numel() == 1 else loss.sum(), logits


def run(model, owners, inputs, checkpointing):

    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(model, "gradient_checkpointing_disable"):
        with contextlib.suppress(ValueError):
            model.gradient_checkpointing_disable()
    storages = Storages()
    for tensor in [*model.parameters(), *model.buffers(), *inputs.values()]:
        storages.know(tensor)
    timeline = Timeline(storages)
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}

    def ready(parameter):
        timeline.add(GRADIENT, numbers[id(parameter)])
        parameter.grad = None

    handles = [each for index, module in enumerate(owners) for each in hook(module, index, timeline)]
    handles += [p.register_post_accumulate_grad_hook(ready) for p in model.parameters() if p.requires_grad]
    try:
        with watching(storages):
            output = model(**inputs)
            loss, logits = loss_and_logits(output)
            timeline.logits = logits.untyped_storage().nbytes() if logits is not None else 0
            del output, logits
            timeline.add(LOSS, 0)
            loss.backward()
            del loss
            timeline.add(END, 0)
    finally:
        for handle in handles:
            handle.remove()
    return timeline


def configuration_of(path):
    """A Hugging Face configuration of a file or a folder. Nothing is fetched, no code of the folder is run."""
    import transformers

    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    with open(file, encoding="utf-8") as stream:
        fields = json.load(stream)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ValueError("the file has no model_type: it is no configuration of Hugging Face")
    if fields.get("auto_map"):
        raise ValueError("it brings code of its own (auto_map), which is not run: name file.py:function instead")
    return transformers.AutoConfig.for_model(kind, **fields)


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
    if ":" in os.path.basename(place) and place.partition(".py:")[2].isidentifier():
        model, inputs = from_python(place)
        config = getattr(model, "config", None)
    else:
        config = configuration_of(place)
        config.use_cache = False
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
        with mode:
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


def fake_like(tensor):
    import torch

    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


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
    with mode:
        owners = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        result = {
            **described(model, owners),
            "class": type(model).__name__,
            "attention": str(getattr(config, "_attn_implementation", "")),
            "hidden_size": getattr(config, "hidden_size", None) or getattr(config, "d_model", None),
        }
        with contextlib.suppress(Exception):  # what cannot run is told with its run
            batch, sequence, _ = wish["runs"][0]
            result["kept"] = kept_views(model, [m for _, m in owners], of(model, config, given, batch, sequence))
        result["runs"] = [told(model, config, given, owners, wanted) for wanted in wish["runs"]]
    result["seconds"] = time.monotonic() - started
    result["own_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def of(model, config, given, batch, sequence):
    if given is None:
        return inputs_of(model, config, batch, sequence)
    return given(batch, sequence) if callable(given) else given


def told(model, config, given, owners, wanted):
    result = dict(zip(("batch", "sequence", "checkpointing"), wanted, strict=True))
    try:
        inputs = of(model, config, given, *wanted[:2])
        timeline = run(model, [module for _, module in owners], inputs, wanted[2])
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0][:300]
        return {**result, "error": "%s: %s" % (type(error).__name__, first)}
    size = sum(each.numel() * each.element_size() for each in inputs.values())
    return {**result, "events": timeline.events, "logits": timeline.logits, "inputs": size}


def main():
    logging.disable(logging.WARNING)
    talk = io.StringIO()
    try:
        with contextlib.redirect_stdout(talk):
            result = answer(json.loads(sys.argv[1]))
    except ImportError as error:
        result = {"error": str(error), "missing": error.name or "torch"}
    except Exception as error:
        result = {"error": "%s: %s" % (type(error).__name__, str(error)[:2000])}
    print("DSDOCTOR " + json.dumps(result))


if __name__ == "__main__":
    main()
