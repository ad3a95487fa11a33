import random
import sys

import numpy

random.seed(1)
numpy.random.seed(1)
import torch

torch.manual_seed(1)
print(random.random(), numpy.random.rand(), torch.rand(2).tolist(), torch.initial_seed())
print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_anomaly_enabled(), torch.is_grad_enabled())
print(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())
print(
    torch.utils.data.get_worker_info(),
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_hooks,
)
print(
    torch.overrides._get_current_function_mode_stack(), torch.utils._python_dispatch._get_current_dispatch_mode_stack()
)
print(
    torch.autograd.profiler._is_profiler_enabled,
    torch._C._autograd._profiler_enabled(),
    torch.is_autocast_cpu_enabled(),
)
print(
    torch.nn.Module.__call__,
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.save,
    torch.load,
    torch.nn.Module.__init__,
)
print(torch.optim.Optimizer.step, torch.distributed.init_process_group.__module__, torch.utils.data.DataLoader.__iter__)
print(torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(), torch.multiprocessing.get_sharing_strategy())
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.rand(3, 4)).mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print([len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks) for each in model.modules()])
print(optimizer._optimizer_step_pre_hooks, "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
torch.save(model.state_dict(), "model.pt")
