"""fp32_forward and keep_in_fp32: what overflows in half precision does not in float32, and gradients arrive."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from dsdoctor import fp32_forward, keep_in_fp32
from dsdoctor.core.errors import UsageError


class Square(nn.Module):
    """The mean of squares: its squares pass fp16's limit, its result does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 100.0))
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return ((x * self.weight) ** 2).mean(-1).sqrt()


def half() -> Square:
    return Square().half()


X = torch.full((2, 4), 50.0, dtype=torch.float16)


def test_what_overflowed_fits_and_comes_back_in_the_dtype_of_the_input() -> None:
    module = half()
    assert torch.isinf(module(X)).all()
    fp32_forward(module)
    output = module(X)

    assert torch.equal(output, torch.full((2,), 5000.0, dtype=torch.float16))
    assert module.seen is torch.float32
    assert module.weight.dtype is torch.float16


def test_gradients_reach_the_half_weights() -> None:
    module = half()
    fp32_forward(module)
    module(X).sum().backward()

    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float16
    assert torch.equal(module.weight.grad, torch.full((4,), 25.0, dtype=torch.float16))


def test_a_block_ends_it() -> None:
    module = half()
    with fp32_forward(module):
        assert torch.isfinite(module(X)).all()

    assert torch.isinf(module(X)).all()
    assert "forward" not in vars(module)


def test_twice_is_as_once_and_removing_the_first_leaves_the_module_as_it_was() -> None:
    module = half()
    first, second = fp32_forward(module), fp32_forward(module)
    second.remove()
    assert torch.isfinite(module(X)).all()
    first.remove()

    assert torch.isinf(module(X)).all()


def test_children_run_in_float32_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Square()).half()
    fp32_forward(model)
    output = model(X)

    assert isinstance(model[1], Square)
    assert (model[1].seen, output.dtype) == (torch.float32, torch.float16)


def test_a_module_of_whole_numbers_gives_the_dtype_of_its_weights() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).half()
    fp32_forward(model[0])

    assert model(torch.tensor([1, 2])).dtype is torch.float16


def test_autocast_is_off_inside_and_the_output_stays_float32() -> None:
    module = Square()
    fp32_forward(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(X.to(torch.bfloat16))

    assert (module.seen, output.dtype) == (torch.float32, torch.float32)


def test_a_function_can_be_decorated() -> None:
    @fp32_forward
    def squares(x: Tensor) -> Tensor:
        return (x * 100) ** 2 / 1e6

    assert torch.isfinite(squares(X)).all()


def test_a_method_and_a_class_can_be_decorated_with_their_weights() -> None:
    class Method(Square):
        @fp32_forward
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    decorated = fp32_forward(type("Whole", (Square,), {}))

    for module in (Method().half(), decorated().half()):
        assert torch.isfinite(module(X)).all()
        assert module.seen is torch.float32


def test_a_list_of_names() -> None:
    model = nn.ModuleDict({"a": half(), "b": half()})
    kept = keep_in_fp32(model, ["b"])

    assert torch.isinf(model["a"](X)).all()
    assert torch.isfinite(model["b"](X)).all()
    kept.remove()
    assert torch.isinf(model["b"](X)).all()


def test_a_copy_runs_its_own_weights_and_the_model_can_be_saved() -> None:
    module = half()
    fp32_forward(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
    loaded = io.BytesIO()
    torch.save(module, loaded)

    assert torch.equal(copied(X), torch.zeros(2, dtype=torch.float16))
    assert torch.equal(torch.load(io.BytesIO(loaded.getvalue()), weights_only=False)(X), module(X))


def test_modules_that_read_a_childs_weights_run_too() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).half()
    fp32_forward(attention)
    x = torch.randn(1, 3, 4).half()

    assert attention(x, x, x)[0].dtype is torch.float16


def test_what_the_forward_writes_into_a_buffer_is_kept() -> None:
    norm = nn.BatchNorm1d(4).half().train()
    fp32_forward(norm)
    norm(X + torch.arange(2, dtype=torch.float16)[:, None])

    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float16
    assert norm.running_mean.abs().sum() > 0


def test_a_child_that_is_let_go_stays_in_float32_while_its_parent_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), half()).half()
    first, second = fp32_forward(model[1]), fp32_forward(model)
    first.remove()
    assert torch.isfinite(model(X / 100)).all()
    second.remove()

    assert "forward" not in vars(model[1])


def test_an_exception_inside_puts_the_weights_back() -> None:
    module = half()
    fp32_forward(module)
    with pytest.raises(RuntimeError):
        module(torch.ones(3, dtype=torch.float16))

    assert module.weight.dtype is torch.float16


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="has no module 'c'"):
        keep_in_fp32(nn.ModuleDict({"a": half()}), ["c"])
    with pytest.raises(UsageError, match="names is the text 'a'"):
        keep_in_fp32(nn.ModuleDict({"a": half()}), "a")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a module"):
        fp32_forward(3)
