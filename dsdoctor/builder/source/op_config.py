"""A DeepSpeed configuration (``ds_config.json``) -> the ops that a training with it will load."""

from pathlib import Path
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.core.json_text import decode

OPTIMIZERS = {
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "lamb": ("fused_lamb", None),
    "lion": ("fused_lion", "cpu_lion"),
    "adagrad": (None, "cpu_adagrad"),
}


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises UsageError when it is no JSON object."""
    try:
        config = decode(read_limited(path), object)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no DeepSpeed configuration: {error}", hint="name a ds_config.json") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path} holds a {type(config).__name__}, a DeepSpeed configuration is an object",
            hint="name a ds_config.json",
        )
    return config


def ops_of_config(config: dict[str, Any], *, accelerator: str) -> tuple[str, ...]:
    """The ops, in a stable order. ``accelerator`` is "cuda" or "cpu".

    >>> ops_of_config({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3,
    ...     "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}}, accelerator="cuda")
    ('async_io', 'cpu_adam', 'pin_memory', 'utils')
    """
    zero = _section(config, "zero_optimization")
    devices = {_device(zero, "offload_optimizer"), _device(zero, "offload_param")}
    if zero.get("cpu_offload"):
        devices.add("cpu")
    on_host = _device(zero, "offload_optimizer") in {"cpu", "nvme"} or bool(zero.get("cpu_offload"))
    ops = {"utils"} if accelerator == "cuda" else set()
    ops |= _optimizer_ops(_section(config, "optimizer"), on_host=on_host)
    if "nvme" in devices:
        ops |= {"async_io", "pin_memory"}
    if _section(config, "aio").get("use_gds"):
        ops |= {"gds", "pin_memory"}
    if _section(_section(_section(config, "data_efficiency"), "data_routing"), "random_ltd").get("enabled"):
        ops.add("random_ltd")
    if _section(config, "compile").get("deepcompile"):
        ops.add("dc")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.add("quantizer")
    return tuple(sorted(ops))


def _optimizer_ops(optimizer: dict[str, Any], *, on_host: bool) -> set[str]:
    name = str(optimizer.get("type", "")).lower()
    parameters = _section(optimizer, "params")
    if name not in OPTIMIZERS or parameters.get("torch_adam"):
        return {"cpu_adam"} if on_host and not name else set()
    on_device, host = OPTIMIZERS[name]
    chosen = host if on_host else on_device
    return {chosen} if chosen else set()


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _device(zero: dict[str, Any], name: str) -> str:
    return str(_section(zero, name).get("device", "none")).lower()
