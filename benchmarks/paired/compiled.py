import torch

torch.manual_seed(0)


@torch.compile(backend="inductor")
def gelu(x):
    return x * torch.sigmoid(1.702 * x)


model = torch.compile(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)), backend="aot_eager"
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = gelu(model(torch.rand(4, 8))).mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
explained = torch._dynamo.explain(lambda x: torch.sin(x) + 1)(torch.ones(2))
print(explained.graph_break_count, torch._dynamo.utils.counters["frames"])
print(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).graph_signature.user_inputs)
print(torch.jit.script(torch.nn.ReLU())(torch.tensor(-1.0)), torch.fx.symbolic_trace(torch.nn.ReLU()).code)
