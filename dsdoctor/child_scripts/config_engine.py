"""What deepspeed.initialize itself refuses of a configuration, beyond what DeepSpeedConfig does: the engine is made for a model
of two parameters, by one rank without a network, on the CPU. Imported by ask_config.py, which ends with its answer.

Only what bears on the engine and its ZeRO optimizer is tried: sections that write files, send something, or want a GPU are left
out, buckets are small. What counts is an exception that DeepSpeed raises itself; every other failure tells of this machine.
"""

import linecache
import math
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
RANKS = (
    *(("zero_optimization", "zero_hpz_partition_size"), ("sequence_parallel_size",), ("data_parallel_size",)),
    *(("tensor_parallel", "autotp_size"), ("tensor_parallel", "tp", "tp_size")),
    *(("expert_parallel", "autoep_size"), ("expert_parallel", "expert_tensor_parallel_size")),
)
"""Keys that say how many ranks share something."""
TENSOR = RANKS[3:5]
MAX_RANKS = 4096
"""Groups of more ranks take too long to make."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
SMALL = 1000
OF_THE_MACHINE = re.compile(r"\b(CPU backend|CUDA|NVIDIA|GPUs?|accelerator|not installed|not compatible)\b")
USUAL = (["zero_optimization", "stage"], ["optimizer", "type"])
GROUPS = {}
"""What DeepSpeed's module of groups holds before there are any."""
NOT_TRIED = ("muon",)
"""Optimizers that look at the model's own parameters."""


def tried(config, *, alone=True):
    """The part of a configuration that is tried, without "auto". ``alone``: without what takes several ranks."""
    found = {
        key: without_autos(value)
        for key, value in plain(config).items()
        if value != "auto" and (is_tried(key, value) or (not alone and key in {path[0] for path in RANKS}))
    }
    zero = found.get("zero_optimization")
    if isinstance(zero, dict):
        kept = () if alone else {path[1] for path in RANKS if path[0] == "zero_optimization"}
        for key in ZERO_NEEDS_MORE:
            if key not in kept:
                zero.pop(key, None)
        zero.update(dict.fromkeys(BUCKETS, SMALL) if zero.get("stage") else {})
        for name in ("offload_optimizer", "offload_param"):
            on_host(zero.get(name))
    return found


def is_tried(key, value):
    return key not in (*SIZES, *NEEDS_MORE) and (key in SECTIONS or not isinstance(value, dict))


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


def initialize(config, accumulation, *, alone=True):
    """None, or the error of deepspeed.initialize."""
    import deepspeed
    import torch

    config = {**tried(config, alone=alone), "train_micro_batch_size_per_gpu": 1}
    config["gradient_accumulation_steps"] = accumulation
    # told by itself, where it stands in the configuration
    config["zero_allow_untested_optimizer"] = True
    tensor = max([lookup(config, path) or 1 for path in TENSOR if type(lookup(config, path)) is int], default=1)
    model = torch.nn.Linear(2, 2) if tensor == 1 else layers(8 * tensor)
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


def layers(width):
    """A model whose layers DeepSpeed knows how to divide among ranks, by the names of what is in them."""
    import torch

    layer = torch.nn.Module()
    layer.self_attn, layer.input_layernorm = torch.nn.Module(), torch.nn.LayerNorm(width)
    layer.self_attn.q_proj, layer.self_attn.o_proj = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
    model = torch.nn.Module()
    # DeepSpeed looks at the names of their classes, too
    layer.__class__ = type("Layer", (torch.nn.Module,), {})
    model.__class__ = type("TinyModel", (torch.nn.Module,), {})
    model.layers = torch.nn.ModuleList([layer])
    return model


def programs_own(model, config):
    """The optimizer that a program would bring: the one that DeepSpeed wants there."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return (DeepSpeedCPUAdam if offloads(config) else torch.optim.AdamW)(model.parameters(), lr=1e-3)


def join(world=1, rank=0):
    """A rank of a world in which nobody else is: no port is opened. More than one rank only where torch can pretend them."""
    import deepspeed
    import torch

    leave()
    try:
        # no thread of it is left when the process ends
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        if world > 1:
            raise
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    os.environ.update(place)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def leave():
    """Forget the world before: DeepSpeed keeps its groups in the variables of two modules."""
    import torch
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if not GROUPS:
        GROUPS.update({name: copied(value) for name, value in vars(groups).items() if not callable(value)})
    vars(groups).update({name: copied(value) for name, value in GROUPS.items()})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    comm.cdb = None


def copied(value):
    return dict(value) if type(value) is dict else value


def on_cpu():
    """What only the CPU is needed for: nothing is compiled."""
    import torch
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    torch.set_num_threads(1)
    accelerator = CPU_Accelerator()
    # torch computes it slowly on CPUs, and the training need not run on one
    accelerator.is_fp16_supported = lambda: True
    set_accelerator(accelerator)
    config_optimizer.leave_ops_out()


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
        if differs(other, error):
            found.append(list(path))
    return sorted(found, key=lambda path: path in USUAL)


def in_world(config, world):
    """None, or the error of the first or the last of so many ranks."""
    from deepspeed import comm

    asked = comm.get_rank, comm.get_world_size
    try:
        for rank in (0, world - 1):
            join(world, rank)
            comm.get_rank, comm.get_world_size = comm.comm.get_rank, comm.comm.get_world_size
            error = initialize(config, 1, alone=False)
            if error is not None:
                return error
        return None
    finally:
        comm.get_rank, comm.get_world_size = asked
        join()


def place_of(error):
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def refused_by_ranks(config, world):
    """What is refused for so many ranks, and not for as many as fit: [one refusal], or []."""
    sizes = {path: size for path in RANKS if type(size := lookup(config, path)) is int and size > 1}
    if not sizes or not 1 < world <= MAX_RANKS:
        return []
    error = in_world(config, world)
    if error is None:
        return []
    both = sizes.get(("sequence_parallel_size",), 1) * sizes.get(("data_parallel_size",), 1)
    fitting = math.lcm(both, *sizes.values())
    elsewhere = in_world(config, fitting) if fitting not in (1, world) and fitting <= MAX_RANKS else error
    if elsewhere is not None and place_of(elsewhere) == place_of(error):
        return []
    paths = [list(path) for path in sizes if differs(in_world(without(config, path), world), error)]
    refused = {"paths": paths or [list(path) for path in sizes], "kind": type(error).__name__, "ranks": world}
    return [{**refused, "message": str(error).strip(), "model": "deepspeed.initialize"}]


def without(config, path):
    less = plain(config)
    remove(less, path)
    return less


def differs(other, error):
    return other is None or (type(other), str(other)) != (type(error), str(error))


def ask(config, refused, facts, optimizer, world=1):
    """([refusals], "") where there are any, and ([], why) where it could not be tried. ``refused``: paths that DeepSpeedConfig
    refuses; ``world``: all ranks, 1 where nobody knows."""
    config = plain(config)
    for path in refused:
        remove(config, path)
    name = str((optimizer or {}).get("name", "")).lower()
    if name in NOT_TRIED or (optimizer and (optimizer["refused"] or optimizer["not_asked"] or not optimizer["made"])):
        # it is told by itself
        config.pop("optimizer", None)
    for name in (optimizer or {}).get("unknown", ()):
        remove(config, ["optimizer", "params", name])
    accumulation = facts["accumulation"] if type(facts["accumulation"]) is int else 1
    on_cpu()
    error = initialize(config, accumulation)
    if error is None:
        return refused_by_ranks(config, world), ""
    words = refusal(error)
    if words is None:
        return [], f"{type(error).__name__}: {error}"
    paths = culprits(config, error, accumulation)
    return [{"paths": paths, "kind": type(error).__name__, "message": words, "model": "deepspeed.initialize"}], ""
