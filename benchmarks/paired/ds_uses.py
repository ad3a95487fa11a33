"""What scripts do with an engine and its model beside training it: copies, pickles, traces, several engines, odd forwards."""

import copy
import gc
import io
import os
import sys
import weakref

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(f"{os.environ['RANK']} {' '.join(map(str, words))}\n")
    sys.stdout.flush()


class Output(dict):
    __getattr__ = dict.__getitem__


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=None, *, note=None):
        x = self.linear(x)
        x += 1.0
        return Output(x=x, note=note, nothing=None) if note else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()
        self.two.linear.weight = self.one.linear.weight
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, fail=False):
        self.count += 1
        x = checkpoint(self.one, x, use_reentrant=False)
        if fail:
            raise KeyError("in the forward")
        x = self.two(x, note="yes").x
        return self.one(x).pow(2).mean()


def made(stage=1, seed=0):
    torch.manual_seed(seed)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]


def steps(engine, n=2):
    for _ in range(n):
        loss = engine(torch.rand(2, 8))
        engine.backward(loss)
        engine.step()
        say("loss", loss.item().hex(), engine.module.count.item())


def whole_model(engine):
    held = io.BytesIO()
    torch.save(engine.module, held)
    held.seek(0)
    return torch.load(held, weights_only=False)(torch.ones(1, 8)).item().hex(), len(held.getvalue())


def deep_copy(engine):
    ema = copy.deepcopy(engine.module)
    loss = ema(torch.ones(1, 8))
    loss.backward()
    return loss.item().hex(), type(ema).__name__, sorted(set(vars(ema)) - set(vars(Net())))


def traced(engine):
    return torch.jit.trace(engine.module.one.linear, torch.ones(1, 8))(torch.ones(1, 8)).sum().item().hex()


def symbolic(engine):
    return [str(node) for node in torch.fx.symbolic_trace(engine.module.one.linear).graph.nodes]


def exported(engine):
    return [str(node) for node in torch.export.export(engine.module.one, (torch.ones(1, 8),)).graph.nodes]


def fails_inside(engine):
    try:
        engine(torch.ones(1, 8), fail=True)
    except KeyError as error:
        names, trace = [], error.__traceback__
        while trace:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        return names[-1], error.args
    return None


def functional(engine):
    weights = dict(engine.module.named_parameters())
    per_row = torch.func.vmap(
        lambda row: torch.func.functional_call(engine.module.one.linear, _of(weights), (row,)).sum()
    )
    return per_row(torch.ones(3, 8)).sum().item().hex()


def _of(weights):
    return {
        name.removeprefix("one.linear."): value for name, value in weights.items() if name.startswith("one.linear.")
    }


def second_derivative(engine):
    x = torch.ones(2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(engine.module.one(x).pow(3).sum(), x, create_graph=True)
    return first.sum().item().hex(), torch.autograd.grad(first.sum(), x)[0].sum().item().hex()


def without_gradients(engine):
    engine.eval()
    with torch.inference_mode():
        first = engine(torch.ones(1, 8)).item().hex()
    with torch.no_grad():
        second = engine.module(torch.ones(1, 8)).item().hex()
    engine.train()
    return first, second


def own_hooks(engine):
    seen = []
    handles = [engine.module.one.register_forward_hook(lambda *_: seen.append("one"))]
    handles.append(engine.module.one.register_full_backward_hook(lambda *_: seen.append("backward")))
    engine.backward(engine(torch.ones(1, 8)))
    for handle in handles:
        handle.remove()
    engine.step()
    return seen


def repr_and_lists(engine):
    module = engine.module
    return (
        repr(module),
        [name for name, _ in module.named_modules()],
        list(module.state_dict()),
        module.one.forward.__name__,
    )


def replaced_module(engine):
    engine.module.two = Block()
    return engine.module(torch.ones(1, 8)).item() > 0


def main():
    deepspeed.init_distributed("gloo")
    engine = made()
    steps(engine)
    uses = (
        whole_model,
        deep_copy,
        traced,
        symbolic,
        exported,
        fails_inside,
        functional,
        second_derivative,
        without_gradients,
    )
    for use in (*uses, own_hooks, repr_and_lists):
        try:
            say(use.__name__, use(engine))
        except Exception as error:
            say(use.__name__, type(error).__name__, str(error).splitlines()[:1])
        engine.zero_grad()
    other = made(stage=0, seed=1)
    steps(other, 1)
    steps(engine, 1)
    say("random", torch.rand(1).item())
    held = weakref.ref(other.module)
    other.destroy()
    del other
    gc.collect()
    say("freed", held() is None)
    say(replaced_module(engine))


main()
