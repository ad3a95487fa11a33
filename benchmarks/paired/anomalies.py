"""A script that looks for bad values by itself, and goes on."""

import torch

torch.manual_seed(0)
seen = []
module = torch.nn.Linear(2, 2)
handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
with torch.autograd.set_detect_anomaly(True):
    x = torch.tensor([[0.0, 1.0]], requires_grad=True)
    try:
        torch.sqrt(module(x) * 0).sum().backward()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
print(seen, module.weight.grad, torch.is_anomaly_enabled())
handle.remove()
module.register_full_backward_hook(lambda m, i, o: print("backward", [tuple(g.shape) for g in o]))
module(torch.ones(1, 2)).sum().backward()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    module(torch.ones(1, 2)).sum().backward()
print(sorted({event.key for event in profile.key_averages()})[:12])
try:
    torch.ones(2) @ torch.ones(3)
except RuntimeError as error:
    print(error)
