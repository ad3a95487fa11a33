import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.source.op_loads import (
    LOADS,
    NOT_BY_CONFIG,
    LoadSite,
    find_load_sites,
    ops_of_config,
    unknown_sites,
)
from dsdoctor.builder.source.training_config import (
    KEYS,
    OPTIMIZERS,
    TORCH_OPTIMIZERS,
    nearly,
    read_config,
    training_configs,
)
from dsdoctor.core.errors import UsageError

STAGE3 = {"stage": 3}


def ops(config: dict[str, Any], accelerator: str) -> tuple[str, ...]:
    return tuple(ops_of_config(training_configs(config), accelerator=accelerator))


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        training_configs(config, name="ds.json")
    assert error.value.message.startswith("ds.json: ")
    return error.value.message


@pytest.mark.parametrize(
    ("config", "loaded"),
    [
        ({}, ()),
        ({"optimizer": {"type": "Adam"}}, ("fused_adam",)),
        ({"optimizer": {"type": "Muon"}}, ("fused_adam",)),
        ({"optimizer": {"type": "SGD"}}, ()),
        ({"optimizer": {"type": "OneBitAdam"}}, ()),
        ({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}}, ("fused_lamb",)),
        ({"optimizer": {"type": "Adagrad"}}, ()),
        (
            {"optimizer": {"type": "Adagrad"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ("cpu_adagrad",),
        ),
        (
            {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ("cpu_adam",),
        ),
        ({"optimizer": {"type": "Lion"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ("cpu_lion",)),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, ()),
        ({"zero_optimization": {"cpu_offload": True}}, ("cpu_adam",)),
        ({"zero_optimization": {"cpu_offload": True}, "zero_force_ds_cpu_optimizer": False}, ()),
        ({"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}}, ("cpu_adam",)),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "optimizer": {"type": "Lion"}},
            ("async_io", "fused_lion", "pin_memory"),
        ),
        # DeepSpeed swaps to NVMe in stage 3 alone
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}}, ()),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "pipeline_read": True}}},
            ("async_io", "cpu_adam", "pin_memory"),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "aio": {"use_gds": True}},
            ("gds", "pin_memory"),
        ),
        ({"aio": {"use_gds": True}}, ()),
        ({"checkpoint": {"writer": {}}}, ("async_io", "pin_memory", "utils")),
        ({"checkpoint": {"writer": {"type": "fast"}}, "aio": {"use_gds": True}}, ("gds", "pin_memory", "utils")),
        ({"checkpoint": {"writer": {"type": "python"}}}, ()),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": "true"}}, ("quantizer",)),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, ("quantizer",)),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": 1}}, ("quantizer",)),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, ()),
        ({"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}, ("quantizer",)),
        ({"hybrid_engine": {"enabled": True}}, ("transformer_inference",)),
        ({"replace_with_kernel_inject": True}, ("transformer_inference",)),
        ({"compile": {"deepcompile": True}, "zero_optimization": STAGE3}, ("dc",)),
        ({"compile": {"deepcompile": True}}, ()),
        ({"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": STAGE3}, ()),
        ({"zero_optimization": True, "optimizer": None}, ()),
        ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, ("random_ltd",)),
        (
            {"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "auto"}}},
            ("cpu_adam", "fused_adam"),
        ),
        (
            {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto", "nvme_path": "auto"}}},
            ("async_io", "pin_memory"),
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
                "zero_optimization": {"zenflow": {"overlap_step": True}, "offload_optimizer": {"device": "cpu"}},
            },
            ("cpu_adam",),
        ),
    ],
)
def test_ops_of_a_cuda_training(config: dict[str, Any], loaded: tuple[str, ...]) -> None:
    assert ops(config, "cuda") == loaded


def test_every_training_on_a_cpu_loads_the_shared_memory_op() -> None:
    offloaded = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    assert ops({}, "cpu") == ("deepspeed_shm_comm",)
    assert ops({"optimizer": {"type": "AdamW"}}, "cpu") == ("deepspeed_shm_comm", "fused_adam")
    assert ops(offloaded, "cpu") == ("cpu_adam", "deepspeed_shm_comm")


def test_each_op_has_the_reason_in_words_of_the_configuration() -> None:
    decided = training_configs({"optimizer": {"type": "AdamW"}, "zero_optimization": {"cpu_offload": True}})

    assert ops_of_config(decided, accelerator="cuda") == {"cpu_adam": "optimizer adamw with offload_optimizer on cpu"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"optimzer": {"type": "Adam"}}, "unknown key optimzer; did you mean optimizer?"),
        ({"Optimizer": {"type": "Adam"}}, "did you mean optimizer?"),
        (
            {"zero_optimization": {"offloadOptimizer": {"device": "cpu"}}},
            "unknown key zero_optimization.offloadOptimizer; did you mean zero_optimization.offload_optimizer?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer must be inside zero_optimization"),
        ({"optimizer": {"type": "AdanW"}}, 'optimizer.type is "AdanW", but must be an optimizer of DeepSpeed'),
        ({"optimizer": {"type": "sgd"}}, "did you mean SGD?"),
        ({"optimizer": {"type": 3}}, "optimizer.type is 3, but must be the name of an optimizer"),
        ({"optimizer": "AdamW"}, 'optimizer is "AdamW", but must be an object'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, but must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, 'must be "none", "cpu" or "nvme"'),
        ({"zero_optimization": {"offload_param": "cpu"}}, "must be an object"),
        ({"zero_optimization": {"zero_quantized_weights": "maybe"}}, "must be true or false"),
        ({"aio": {"use_gds": "false"}}, "true or false without quotes (DeepSpeed takes any text as true)"),
        ({"checkpoint": {"writer": {"type": "slow"}}}, '"FAST", "PYTHON" or "MOCK"'),
        ({"compile": {"deepcompile": True, "passes": "z3"}}, "a list of names"),
    ],
)
def test_what_is_misspelt_or_wrong_is_an_error(config: dict[str, Any], says: str) -> None:
    assert says in refused(config)


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refused({"optimzer": {}, "zero_optimization": {"stage": 9}})

    assert "did you mean optimizer?" in message
    assert "zero_optimization.stage is 9" in message


@pytest.mark.parametrize("text", ["[1]", "{", "null", "adamw", '{"zero_optimization": 1, "zero_optimization": 2}'])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)

    with pytest.raises(UsageError, match="DeepSpeed configuration"):
        read_config(file)


def test_a_configuration_with_comments_and_without_quotes_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{\n  // as DeepSpeed reads it\n  optimizer: {\n    type: AdamW\n  }\n  # so too\n  "fp16": {},\n}\n'
    )

    assert read_config(file) == {"optimizer": {"type": "AdamW"}, "fp16": {}}


def test_a_load_in_a_new_place_is_named(tmp_path: Path) -> None:
    for name, text in {
        "op_builder/new_op.py": "class NewBuilder(OpBuilder):\n    NAME = 'new_op'\n",
        "deepspeed/runtime/engine.py": "class Engine:\n    def start(self):\n        self.op = NewBuilder().load()\n",
        "deepspeed/env_report.py": "ok = NewBuilder().is_compatible()\n",
        "deepspeed/comm/torch.py": 'def build():\n    op = accelerator.create_op_builder("NewBuilder")\n    op.load()\n',
        "deepspeed/nvme/tool.py": "NewBuilder().load()\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    found = unknown_sites(find_load_sites(tmp_path))

    line = 'op = accelerator.create_op_builder("NewBuilder")'
    assert found == (
        LoadSite(file="comm/torch.py", function="build", op="new_op", line=line),
        LoadSite(file="runtime/engine.py", function="Engine.start", op="new_op", line="self.op = NewBuilder().load()"),
    )


def installed() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None, "the extra launch installs DeepSpeed"
    return Path(spec.origin).parents[1]


@pytest.mark.launch
def test_the_table_is_that_of_the_installed_deepspeed() -> None:
    sites = find_load_sites(installed())

    decided = {site for site in sites if not site.file.startswith(NOT_BY_CONFIG)}
    assert decided == {load.site for load in LOADS}
    assert all(any(site.file.startswith(place) for site in sites) for place in NOT_BY_CONFIG)


@pytest.mark.launch
def test_no_key_of_deepspeed_is_taken_for_a_misspelt_one() -> None:
    installed()
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import DeepSpeedInferenceConfig
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, HybridEngineConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from torch import optim

    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "hybrid_engine": HybridEngineConfig,
        "compile": CompileConfig,
        "": DeepSpeedInferenceConfig,
    }
    paths = [key.path for key in KEYS]
    root = frozenset(path.split(".")[0] for path in paths)
    for section, model in sections.items():
        start = f"{section}." if section else ""
        read = frozenset(path[len(start) :].split(".")[0] for path in paths if path.startswith(start))
        known = {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}
        assert not {name: nearly(name, read) for name in known if nearly(name, read)}
        # what is read there is there, but for keys of other releases
        assert section == "" or read <= known
    words = {word for word in vars(constants).values() if isinstance(word, str)}
    assert not {word: nearly(word, root) for word in words if nearly(word, root)}
    classes = {name for name in dir(optim) if isinstance(getattr(optim, name), type)} - {"Optimizer"}
    assert {name for name in classes if name.lower() not in OPTIMIZERS} == set(TORCH_OPTIMIZERS)
    assert set(OPTIMIZERS) == set(DEEPSPEED_OPTIMIZERS)


@pytest.mark.parametrize(
    "text", ['{"a": 1e999}', "{a: -1.0e400}", f"{{a: {'9' * 4000}}}", '{"a": 1, "a": 2}', "[" * 5000, "{a: b", "\xff"]
)
def test_a_number_that_is_too_large_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(UsageError, match="is not a DeepSpeed configuration"):
        read_config(tmp_path / "ds.json")


@pytest.mark.slow
def test_very_many_keys_are_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{" + ",".join(f'"{number}": 1' for number in range(60_000)) + "}")

    assert len(read_config(tmp_path / "ds.json")) == 60_000
