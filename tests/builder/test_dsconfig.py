import json
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.source.op_config import ops_of_config, read_config
from dsdoctor.core.errors import UsageError


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({"optimizer": {"type": "Adam"}}, ("fused_adam", "utils")),
        ({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}}, ("fused_lamb", "utils")),
        (
            {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ("cpu_adam", "utils"),
        ),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, ("utils",)),
        ({"zero_optimization": {"cpu_offload": True}}, ("cpu_adam", "utils")),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}, "optimizer": {"type": "Lion"}},
            ("async_io", "fused_lion", "pin_memory", "utils"),
        ),
        ({"aio": {"use_gds": True}}, ("gds", "pin_memory", "utils")),
        ({"compile": {"deepcompile": True}}, ("dc", "utils")),
        ({"zero_optimization": "auto", "optimizer": None}, ("utils",)),
        ({"data_efficiency": {"data_routing": {"random_ltd": True}}}, ("utils",)),
        ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, ("random_ltd", "utils")),
    ],
)
def test_ops_of_a_cuda_training(config: dict[str, Any], ops: tuple[str, ...]) -> None:
    assert ops_of_config(config, accelerator="cuda") == ops


def test_only_offload_brings_the_optimizer_to_the_host_also_on_a_cpu() -> None:
    offloaded = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    assert ops_of_config({"optimizer": {"type": "AdamW"}}, accelerator="cpu") == ("fused_adam",)
    assert ops_of_config(offloaded, accelerator="cpu") == ("cpu_adam",)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)

    with pytest.raises(UsageError, match="DeepSpeed configuration"):
        read_config(file)


def test_a_configuration_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"optimizer": {"type": "Adam"}}))

    assert read_config(file) == {"optimizer": {"type": "Adam"}}
