"""The optimizer and the scheduler that DeepSpeed itself makes of a configuration, with its ops left out. Imported by ask_config.py.

A DeepSpeedEngine that was never started is asked for them: the same lines of DeepSpeed that run in deepspeed.initialize. Its
ops are replaced in this process by something that accepts every call, so that nothing is compiled.
"""

import inspect
import itertools
import re

UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
NO_GPU = re.compile(r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|CUDA driver", re.IGNORECASE)
MOST_ROUNDS = 40
OF_THE_ENGINE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach")
"""Parameters that the engine takes out before it makes an Adam or a Muon."""


class Anything:
    """Stands for a compiled op."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self


def leave_ops_out():
    from deepspeed.ops import op_builder

    for builder in vars(op_builder).values():
        if isinstance(builder, type) and hasattr(builder, "load"):
            builder.load = lambda *_, **__: Anything()
    # a fused optimizer makes a flag on the GPU, which need not be here
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).IntTensor = property(lambda _: Anything())


def unstarted_engine(config):
    """An engine that has its configuration and a parameter, and nothing else."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    zenflow = getattr(config.zero_config, "zenflow", None)
    facts = {
        "_config": config,
        "client_optimizer": None,
        "client_lr_scheduler": None,
        "has_moe_layers": False,
        "global_rank": 0,
        "pipeline_parallelism": False,
        "zenflow": zenflow is not None,
        "overlap_step": getattr(zenflow, "overlap_step", False),
        "mpu": None,
    }
    engine.__dict__.update(facts)
    return engine


def names():
    """The optimizers and schedulers that this DeepSpeed and this torch have."""
    import torch
    from deepspeed.runtime import config, lr_schedules

    optimizers = [
        name
        for name, kind in vars(torch.optim).items()
        if is_class(kind, torch.optim.Optimizer) and name != "Optimizer"
    ]
    base = getattr(torch.optim.lr_scheduler, "LRScheduler", None) or torch.optim.lr_scheduler._LRScheduler
    schedulers = [
        name
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if is_class(kind, base) and not name.startswith("_")
    ]
    return {
        "optimizers": list(config.DEEPSPEED_OPTIMIZERS),
        "torch_optimizers": sorted(optimizers),
        "schedulers": list(lr_schedules.VALID_LR_SCHEDULES),
        "torch_schedulers": sorted(name for name in schedulers if name != "LRScheduler"),
    }


def is_class(value, base):
    return isinstance(value, type) and issubclass(value, base)


def ask(made, config):
    """What becomes of the optimizer and the scheduler that a configuration names."""
    engine = unstarted_engine(made)
    answer, optimizer = asked_optimizer(engine, config)
    return {"optimizer": answer, "scheduler": asked_scheduler(engine, config, optimizer)}


def params_of(config, section, kind=None):
    """The parameters; "auto" among them is left to its default, or is some number where there is none."""
    holder = config.get(section)
    params = holder.get("params") if isinstance(holder, dict) else None
    params = params if isinstance(params, dict) else {}
    needed = inspect.signature(kind.__init__).parameters if kind else {}
    stand_ins = {name: 1 for name, each in needed.items() if each.default is each.empty}
    return {
        name: value if value != "auto" else stand_ins[name]
        for name, value in params.items()
        if value != "auto" or name in stand_ins
    }


def asked_optimizer(engine, config):
    import torch

    name = engine.optimizer_name()
    if name is None:
        return None, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    answer = {
        "name": str(name),
        "made": "",
        "unknown": [],
        "known": {},
        "refused": "",
        "refused_by": [],
        "dropped": [],
        "not_asked": "",
    }
    if not isinstance(name, str) or not engine._is_supported_optimizer(name):
        return {**answer, "refused": "not supported"}, None
    params = params_of(config, "optimizer")
    made = construct(
        engine, params, answer, lambda: engine._configure_basic_optimizer(parameters(name)), "optimizer_params"
    )
    if made is not None:
        answer["made"] = type(made).__name__
        answer["known"] = defaults_of(type(made).__init__)
        with_muon(engine, params, answer)
        # a learning rate that is text would be laid to the scheduler's charge
        for group in made.param_groups:
            group["lr"] = 1e-3 if isinstance(group.get("lr"), str) else group.get("lr")
        try:
            engine._do_optimizer_sanity_check(made)
        except Exception as error:
            answer["refused"] = answer["refused"] or str(error)
    return answer, made


def with_muon(engine, params, answer):
    """Muon takes its settings out of the parameters by name, and drops the others without a word."""
    halves = [getattr(engine, f"_{half}_HALF_KEYS", None) for half in ("MUON", "ADAM")]
    if answer["name"] != "muon" or not all(halves):
        return
    names = {*itertools.chain(*halves), "muon_lr", "adam_lr"}
    answer["known"] = {name: "float" if name.endswith("lr") else "" for name in sorted(names)}
    answer["dropped"] = [name for name in params if name not in names | {*OF_THE_ENGINE, "per_head_muon"}]


def parameters(name):
    import torch

    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    if name == "muon":
        parameter.use_muon = True
    return [parameter]


def construct(engine, params, answer, make, field):
    """Make it; a parameter that is refused by name, or without which it works, is noted and taken out."""
    for _ in range(MOST_ROUNDS):
        setattr(engine._config, field, dict(params))
        try:
            return make()
        except Exception as error:
            found = UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
            if found and found[1] in params:
                answer["unknown"].append(found[1])
                del params[found[1]]
                continue
            if is_about_this_machine(error) and not caused_by_value(engine, params, make, field, error):
                answer["not_asked"] = f"{type(error).__name__}: {error}"
                return None
            answer["refused"] = str(error) or type(error).__name__
            guilty = caused_by_value(engine, params, make, field, error)
            answer["refused_by"] += guilty
            if not guilty:
                return None
            for name in guilty:
                del params[name]
    return None


def is_about_this_machine(error):
    """Whether something is missing here, and not wrong in the configuration."""
    return isinstance(error, (AttributeError, NameError, ImportError)) or bool(NO_GPU.search(str(error)))


def caused_by_value(engine, params, make, field, error):
    """The parameters without each of which this error does not come."""
    found = []
    for name in params:
        setattr(engine._config, field, {key: value for key, value in params.items() if key != name})
        try:
            make()
        except Exception as other:
            if (type(other), str(other)) == (type(error), str(error)) or isinstance(other, TypeError):
                continue
        found.append(name)
    return found


def asked_scheduler(engine, config, optimizer):
    import torch

    name = engine.scheduler_name()
    if name is None:
        return None
    answer = {
        "name": str(name),
        "made": "",
        "unknown": [],
        "known": {},
        "refused": "",
        "refused_by": [],
        "dropped": [],
        "not_asked": "",
    }
    from deepspeed.runtime import lr_schedules

    kind = getattr(lr_schedules, str(name), None) or getattr(torch.optim.lr_scheduler, str(name), None)
    if not isinstance(kind, type):
        return {**answer, "refused": "not known"}
    if optimizer is None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    params = params_of(config, "scheduler", kind)
    answer["known"] = defaults_of(kind.__init__)
    if not isinstance(config["scheduler"].get("params"), dict):
        answer["refused"] = "no params"
        return answer
    made = construct(engine, params, answer, lambda: engine._scheduler_from_config(optimizer), "scheduler_params")
    answer["made"] = type(made).__name__ if made is not None else ""
    return answer


def defaults_of(function):
    """The parameters that can be named, with their defaults as text: "" for none, what a number is for a number."""
    found = {}
    for parameter in list(inspect.signature(function).parameters.values())[2:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[parameter.name] = kind_of(parameter.default)
    return found


def kind_of(default):
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), ((list, tuple), "list")):
        if isinstance(default, kind):
            return name
    return ""
