"""What of a configuration is tried on an engine, and which of its failures are refusals. Nothing is tried here."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dsdoctor.core.host import CHILD_SCRIPTS
from tests.config.many import ask_many


@pytest.fixture(scope="module")
def optimizer(engine: ModuleType) -> ModuleType:
    """The script that makes optimizers: it lies beside the other one."""
    import config_optimizer

    return config_optimizer


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    """The child's script; it imports DeepSpeed only where it tries something."""
    sys.path.insert(0, str(CHILD_SCRIPTS))
    import config_engine

    yield config_engine
    sys.path.remove(str(CHILD_SCRIPTS))


def test_what_writes_sends_or_wants_a_gpu_is_left_out(engine: ModuleType) -> None:
    config = {
        "train_batch_size": 64,
        "gradient_clipping": "auto",
        "prescale_gradients": True,
        "tensorboard": {"enabled": True},
        "wandb": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 500_000_000,
            "zero_hpz_partition_size": 8,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "super_offload": True},
        },
    }

    assert engine.tried(config) == {
        "prescale_gradients": True,
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-8}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
        },
    }
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000  # type: ignore[index]


@pytest.mark.parametrize(
    ("code", "place", "counts"),
    [
        ("assert False, 'not yet supported'", "deepspeed/runtime/engine.py", True),
        ("raise ValueError(\n    'not yet supported',\n)", "deepspeed/runtime/engine.py", True),
        ("raise ValueError('this op had not been implemented on CPU backend.')", "deepspeed/ops/op.py", False),
        ("raise AssertionError('found accelerator cpu')", "deepspeed/runtime/engine.py", False),
        ("{}['no such key']", "deepspeed/runtime/engine.py", False),
        ("raise ValueError('torch says no')", "torch/engine.py", False),
        ("assert False", "deepspeed/runtime/engine.py", False),
    ],
)
def test_only_what_deepspeed_refuses_in_words_counts(
    engine: ModuleType, tmp_path: Path, code: str, place: str, counts: bool
) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    with pytest.raises(Exception) as failed:
        exec(compile(code, str(file), "exec"), {})

    assert (engine.refusal(failed.value) is not None) is counts


def not_decoded() -> None:
    b"\xe2".decode("ascii")


def not_opened() -> None:
    Path("/no/such/template.py.jinja").read_text()


def refuses_value() -> None:
    raise ValueError("Invalid beta parameter")


@pytest.mark.parametrize("at_step", [False, True])
@pytest.mark.parametrize(
    ("fault", "judged", "only_once"),
    [
        (not_decoded, False, False),
        (not_decoded, False, True),
        (not_opened, False, False),
        (not_opened, False, True),
        (refuses_value, True, False),
    ],
)
def test_a_file_that_cannot_be_read_is_laid_to_no_parameter(
    optimizer: ModuleType, fault: Callable[[], None], judged: bool, only_once: bool, at_step: bool
) -> None:
    calls: list[object] = []

    def make(params: object) -> object:
        calls.append(params)
        if len(calls) > 1 and only_once:
            return object()
        return optimizer.stepped(object(), fault) if at_step else fault()

    answer = optimizer.nothing_known("adamw")

    assert optimizer.construct({"lr": 1e-3, "eps": 1e-8}, answer, make) is None or judged
    assert (bool(answer["refused"]), bool(answer["not_asked"])) == (judged, not judged)
    assert judged or (answer["refused_by"], len(calls)) == ([], 1)
    assert judged or answer["not_asked"].split(": ")[0] in {"UnicodeDecodeError", "FileNotFoundError"}


@pytest.mark.parametrize(
    ("words", "of_this_machine"),
    [
        ("Please initialize the torch distributed backend.", True),
        ("Default process group has not been initialized, please make sure to call init_process_group.", True),
        ("No module named 'cupy'", True),
        ("Torch not compiled with CUDA enabled", True),
        ("Invalid learning rate: -1.0", False),
        ("freeze_step must be positive", False),
    ],
)
def test_an_optimizer_that_lacks_ranks_or_a_gpu_is_not_judged(
    optimizer: ModuleType, words: str, of_this_machine: bool
) -> None:
    assert optimizer.is_about_this_machine(AssertionError(words)) is of_this_machine


@pytest.mark.launch
def test_a_group_is_there_when_an_optimizer_asks_for_it_and_what_was_told_is_told_once() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "bettas": [0.9, 0.9]}}}
    (answer,) = ask_many([config])
    code = "import ask_config, torch; ask_config.join_alone(); print(torch.distributed.is_initialized())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHILD_SCRIPTS, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout.splitlines()[-1:] == ["True"]
    assert answer.optimizer is not None
    assert (answer.optimizer.unknown, answer.refusals) == (("bettas",), ())
