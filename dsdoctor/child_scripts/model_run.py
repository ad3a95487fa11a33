"""One forward and one backward pass of a model, with what lives beside its parameters at each event. Imported by ask_model.py."""

import contextlib
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


class Attention:
    """Whose kernel decides what attention takes: with dropout, or a mask that is trained, torch's CPU has no fused one, and
    makes the scores of every token with every other; GPUs mostly have one (torch's flash and memory-efficient kernels).

    ``fused``: follow it as a kernel does that makes no scores. ``decides``: it was called in such a way.
    """

    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, fused):
        self.fused = fused
        self.decides = False

    def mode(self):
        import torch
        from torch.overrides import TorchFunctionMode

        attention = torch.nn.functional.scaled_dot_product_attention
        told = self

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                if func is not attention:
                    return func(*args, **kwargs)
                return told.attend(func, {**dict(zip(told.NAMES, args, strict=False)), **kwargs})

        return Mode()

    def attend(self, attention, given):
        mask = given.get("attn_mask")
        trained = mask is not None and mask.requires_grad
        self.decides = self.decides or trained or given.get("dropout_p", 0.0) > 0
        if not self.fused:
            return attention(**given)
        result = attention(**{**given, "dropout_p": 0.0, "attn_mask": mask.detach() if trained else mask})
        return gradient_of_mask(result, mask, given) if trained else result


def gradient_of_mask(result, mask, given):
    """The result, with a gradient for the mask: of the size of all scores in the backward pass, as the kernel makes it."""
    import torch

    size = (*given["query"].shape[:-1], given["key"].shape[-2])
    shape = mask.shape

    class Linked(torch.autograd.Function):
        @staticmethod
        def forward(_, found, _mask):
            return found.detach()

        @staticmethod
        def backward(_, gradient):
            return gradient, gradient.new_zeros(size).sum_to_size(shape)

    return Linked.apply(result, mask)


def run(model, owners, inputs, checkpointing, attention):
    """The timeline of one step."""
    if checkpointing:
        # Tensor.backward goes through the mode and takes it off: what is computed again in it is given its own
        again = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), attention.mode())}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
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
        with attention.mode(), watching(storages):
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
