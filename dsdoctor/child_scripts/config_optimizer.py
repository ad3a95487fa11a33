"""The optimizer and the scheduler that DeepSpeed itself makes of a configuration, with its ops left out. Imported by ask_config.py.

A DeepSpeedEngine that was never started is asked for them: the same lines of DeepSpeed that run in deepspeed.initialize. Its
ops are replaced in this process by something that accepts every call, so that nothing is compiled.
"""

import importlib.util
import itertools
import re
import sys

import config_parameters as parameters_of_class

UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
LACKING = re.compile(r"missing \d+ required positional arguments?: (.*)")
NO_GPU = re.compile(r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|CUDA driver", re.IGNORECASE)
NO_RANKS = re.compile(r"distributed backend|process group|not been initialized|\bMPI\b|mpi4py|cupy", re.IGNORECASE)
"""What an optimizer says that wants to talk to other ranks, where there are none."""
MAX_ROUNDS = 40
STEPS = 2
ON_A_GPU_ONLY = ("capturable", "fused")
"""Parameters that torch refuses where there is no GPU."""
OF_THE_ENGINE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach")
"""Parameters that the engine takes out before it makes an Adam or a Muon."""


class Anything:
    """Stands for a compiled op, or for a package that only a GPU needs."""

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
    # 1-bit optimizers compress with it on GPUs
    if importlib.util.find_spec("cupy") is None:
        sys.modules.setdefault("cupy", Anything())


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
    needed = parameters_of_class.parameters_of(kind.__init__) if kind else []
    stand_ins = {each.name: 1 for each in needed if each.default is each.empty}
    return {
        name: value if value != "auto" else stand_ins[name]
        for name, value in params.items()
        if value != "auto" or name in stand_ins
    }


def nothing_known(name):
    return {
        "name": str(name),
        "made": "",
        "unknown": [],
        "known": {},
        "choices": {},
        "refused": "",
        "refused_by": [],
        "at_step": False,
        "warned": [],
        "step_wants": [],
        "dropped": [],
        "not_asked": "",
    }


class AtStep(Exception):
    """It was made, and its first steps fail."""


def stepped(made, step):
    """What was made, once it has made a few steps."""
    try:
        for _ in range(STEPS):
            step()
    except Exception as error:
        raise AtStep(str(error) or type(error).__name__) from error
    return made


def make_optimizer(engine, name, params):
    """An optimizer of these parameters; a class of torch's own makes its first steps, too."""
    engine._config.optimizer_params = dict(params)
    made = engine._configure_basic_optimizer(parameters(name))
    if not type(made).__module__.startswith("torch."):
        return made
    # what only a GPU can do is not tried
    less = {key: value for key, value in params.items() if key not in ON_A_GPU_ONLY}
    engine._config.optimizer_params = dict(less)
    tried = engine._configure_basic_optimizer(parameters(name))
    for group in tried.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach() + 0.5
    stepped(tried, tried.step)
    return made


def step_as_the_engine(scheduler, engine):
    """runtime/engine.py, _take_model_step: where step() fails by a TypeError, it is called once more with the batch size."""
    try:
        scheduler.step()
    except TypeError:
        scheduler.step(engine._config.train_batch_size)


def wanted_by_step(scheduler):
    """The arguments without which a scheduler makes no step."""
    error = refusal(lambda _: scheduler.step(), {})
    found = LACKING.search(str(error)) if isinstance(error, TypeError) else None
    return re.findall(r"'(\w+)'", found[1]) if found else []


def make_scheduler(engine, optimizer, params):
    """A scheduler of these parameters, after its first steps; the optimizer is then as it was."""
    engine._config.scheduler_params = dict(params)
    before = [dict(group) for group in optimizer.param_groups]
    try:
        made = engine._scheduler_from_config(optimizer)
        return stepped(made, lambda: step_as_the_engine(made, engine))
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(old)


def asked_optimizer(engine, config):
    import torch

    name = engine.optimizer_name()
    if name is None:
        return None, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    answer = nothing_known(name)
    if not isinstance(name, str) or not engine._is_supported_optimizer(name):
        return {**answer, "refused": "not supported"}, None
    params = params_of(config, "optimizer")
    made = construct(params, answer, lambda given: make_optimizer(engine, name, given))
    if made is not None:
        know(answer, type(made))
        with_muon(engine, params, answer)
        # a learning rate that is text would be laid to the scheduler's charge
        for group in made.param_groups:
            group["lr"] = 1e-3 if isinstance(group.get("lr"), str) else group.get("lr")
        try:
            engine._do_optimizer_sanity_check(made)
        except Exception as error:
            if is_unread_file(error):
                answer["not_asked"] = f"{type(error).__name__}: {error}"
            else:
                answer["refused"] = answer["refused"] or str(error)
    elif isinstance(getattr(torch.optim, name, None), type):
        know(answer, getattr(torch.optim, name))
        answer["made"] = ""
    return answer, made


def know(answer, kind):
    answer["made"] = kind.__name__
    answer["known"] = parameters_of_class.kinds_of(kind)
    answer["choices"] = parameters_of_class.choices_of(kind)


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


def construct(params, answer, make):
    """Make it; a parameter that is refused by name, or without which it works, is noted and taken out of ``params``."""
    for _ in range(MAX_ROUNDS):
        try:
            made = make(params)
            answer["warned"] = parameters_of_class.warned(params, make)
            return made
        except Exception as error:
            found = UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
            if found and found[1] in params:
                answer["unknown"].append(found[1])
                del params[found[1]]
                continue
            # a file that could not be read is no value's fault, and may be read by the next attempt
            guilty = {} if is_unread_file(error) else caused_by_value(params, make, error)
            if is_about_this_machine(error) and not guilty:
                cause = error.__cause__ if isinstance(error, AtStep) else error
                answer["not_asked"] = f"{type(cause).__name__}: {cause}"
                return None
            answer["refused"] = str(error) or type(error).__name__
            answer["at_step"] = isinstance(error, AtStep)
            answer["refused_by"] += guilty
            if not guilty:
                return None
            params.update(guilty)
            for name in [name for name, other in guilty.items() if other is None]:
                del params[name]
    return None


def is_about_this_machine(error):
    """Whether something is missing here, and not wrong in the configuration."""
    missing, words = (AttributeError, NameError, ImportError), str(error)
    return isinstance(error, missing) or is_unread_file(error) or bool(NO_GPU.search(words) or NO_RANKS.search(words))


def is_unread_file(error):
    """Whether a file of torch's or DeepSpeed's own could not be read, which no check of a parameter raises."""
    return isinstance(error.__cause__ if isinstance(error, AtStep) else error, (OSError, UnicodeError))


def caused_by_value(params, make, error):
    """The parameters without each of which this error does not come -> what stands in for one that is needed, else None.

    Where one of them is text, the others are not to blame: nothing computes with text.
    """
    found = {}
    for name in params:
        less = {key: value for key, value in params.items() if key != name}
        for stand_in in (None, 1):
            other = refusal(make, less if stand_in is None else {**less, name: stand_in})
            if isinstance(other, TypeError) and LACKING.search(str(other)):
                continue
            if other is None or ((type(other), str(other)) != (type(error), str(error)) and not is_type_error(other)):
                found[name] = stand_in
            break
    texts = [name for name, value in params.items() if isinstance(value, str)]
    if not found and texts and refusal(make, {key: params[key] for key in params if key not in texts}) is None:
        return dict.fromkeys(texts)
    return {name: stand_in for name, stand_in in found.items() if name in texts} or found


def refusal(make, params):
    try:
        make(params)
    except Exception as error:
        return error
    return None


def is_type_error(error):
    """Of another parameter, most likely, which is looked at after this one."""
    return isinstance(error, TypeError) or isinstance(error.__cause__, TypeError)


def asked_scheduler(engine, config, optimizer):
    import torch

    name = engine.scheduler_name()
    if name is None:
        return None
    answer = nothing_known(name)
    from deepspeed.runtime import lr_schedules

    kind = getattr(lr_schedules, str(name), None) or getattr(torch.optim.lr_scheduler, str(name), None)
    if not isinstance(kind, type):
        return {**answer, "refused": "not known"}
    if optimizer is None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    params = params_of(config, "scheduler", kind)
    know(answer, kind)
    answer["made"] = ""
    if not isinstance(config["scheduler"].get("params"), dict):
        answer["refused"] = "no params"
        return answer
    made = construct(params, answer, lambda given: make_scheduler(engine, optimizer, given))
    if made is not None:
        answer["made"], answer["step_wants"] = type(made).__name__, wanted_by_step(made)
    return answer
