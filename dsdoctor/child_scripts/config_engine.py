"""What deepspeed.initialize itself refuses of a configuration, beyond what DeepSpeedConfig does: the engine is made for a model
of two parameters, by one rank without a network, on the CPU. Imported by ask_config.py, which ends with its answer.

Only what bears on the engine and its ZeRO optimizer is tried: sections that write files, send something, or want a GPU are left
out, buckets are small. What counts is an exception that DeepSpeed raises itself; every other failure tells of this machine.
"""

import linecache
import os
import re

import config_optimizer
from config_keys import lookup, plain, remove

SECTIONS = ("zero_optimization", "fp16", "bf16", "bfloat16", "data_types", "optimizer")
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NEEDS_MORE = ("sequence_parallel_size", "data_parallel_size", "sparse_attention")
ZERO_NEEDS_MORE = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "zenflow")
ZERO_NEEDS_MORE += ("zero_quantized_nontrainable_weights", "mics_shard_size", "mics_hierarchical_params_gather")
"""Keys that want several ranks, or a GPU."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
SMALL = 1000
OF_THE_MACHINE = re.compile(r"\b(CPU backend|CUDA|NVIDIA|GPUs?|accelerator|not installed|not compatible)\b")
USUAL = (["zero_optimization", "stage"], ["optimizer", "type"])
NOT_TRIED = ("muon",)
"""Optimizers that look at the model's own parameters."""


def tried(config):
    """The part of a configuration that is tried, without "auto"."""
    found = {
        key: without_autos(value)
        for key, value in plain(config).items()
        if value != "auto" and key not in (*SIZES, *NEEDS_MORE) and (key in SECTIONS or not isinstance(value, dict))
    }
    zero = found.get("zero_optimization")
    if isinstance(zero, dict):
        for key in ZERO_NEEDS_MORE:
            zero.pop(key, None)
        zero.update(dict.fromkeys(BUCKETS, SMALL) if zero.get("stage") else {})
        for name in ("offload_optimizer", "offload_param"):
            on_host(zero.get(name))
    return found


def without_autos(value):
    if not isinstance(value, dict):
        return value
    return {key: without_autos(inner) for key, inner in value.items() if inner != "auto"}


def on_host(section):
    """NVMe takes a compiled op and a disk: what is refused is the same for the host."""
    if isinstance(section, dict):
        section.pop("super_offload", None)
        if section.get("device") == "nvme":
            section.update(device="cpu", nvme_path=None)


def offloads(config):
    device = lookup(config, ("zero_optimization", "offload_optimizer", "device"))
    return device is not None and str(device) != "none"


def initialize(config, accumulation):
    """None, or the error of deepspeed.initialize."""
    import deepspeed
    import torch

    config = {**tried(config), "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
    # told by itself, where it stands in the configuration
    config["zero_allow_untested_optimizer"] = True
    model = torch.nn.Linear(2, 2)
    given = {"model": model, "model_parameters": model.parameters()}
    if not lookup(config, ("optimizer", "type")):
        config.pop("optimizer", None)
        given["optimizer"] = programs_own(model, config)
    engine = None
    try:
        engine = deepspeed.initialize(config=config, **given)[0]
    except Exception as error:
        return error
    finally:
        if engine is not None:
            engine.destroy()
    return None


def programs_own(model, config):
    """The optimizer that a program would bring: the one that DeepSpeed wants there."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return (DeepSpeedCPUAdam if offloads(config) else torch.optim.AdamW)(model.parameters(), lr=1e-3)


def start():
    """A rank alone, on the CPU: no port is opened, nothing compiled."""
    import deepspeed
    import torch
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    torch.set_num_threads(1)
    accelerator = CPU_Accelerator()
    # torch computes it slowly on CPUs, and the training need not run on one
    accelerator.is_fp16_supported = lambda: True
    set_accelerator(accelerator)
    config_optimizer.leave_ops_out()
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def refusal(error):
    """DeepSpeed's own words, where it refused; None for a failure of another kind."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    statement = linecache.getline(file, trace.tb_lineno).strip()
    is_theirs = f"{os.sep}deepspeed{os.sep}" in file and f"{os.sep}accelerator{os.sep}" not in file
    words = str(error).strip()
    if not (is_theirs and words and raises(file, trace.tb_lineno, statement)) or OF_THE_MACHINE.search(words):
        return None
    return words


def raises(file, line, statement):
    """Whether a line is, or ends, a statement that refuses something."""
    above = [linecache.getline(file, number).strip() for number in range(max(1, line - 6), line)]
    return any(each.startswith(("raise ", "assert ", "assert(")) for each in (statement, *above))


def leaves(config, path=()):
    """The path of each value that is tried."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def culprits(config, error, accumulation):
    """The keys without each of which DeepSpeed does not say this; those that every configuration has come last."""
    found = []
    for path in leaves(tried(config)):
        less = plain(config)
        if not remove(less, path):
            continue
        other = initialize(less, accumulation)
        if other is None or (type(other), str(other)) != (type(error), str(error)):
            found.append(list(path))
    return sorted(found, key=lambda path: path in USUAL)


def ask(config, refused, facts, optimizer):
    """([one refusal], "") where there is one, and ([], why) where it could not be tried. ``refused``: paths that
    DeepSpeedConfig refuses."""
    config = plain(config)
    for path in refused:
        remove(config, path)
    name = str((optimizer or {}).get("name", "")).lower()
    if name in NOT_TRIED or (optimizer and (optimizer["refused"] or optimizer["not_asked"] or not optimizer["made"])):
        # it is told by itself
        config.pop("optimizer", None)
    accumulation = facts["accumulation"] if type(facts["accumulation"]) is int else 1
    start()
    error = initialize(config, accumulation)
    if error is None:
        return [], ""
    words = refusal(error)
    if words is None:
        return [], f"{type(error).__name__}: {error}"
    paths = culprits(config, error, accumulation)
    return [{"paths": paths, "kind": type(error).__name__, "message": words, "model": "deepspeed.initialize"}], ""
