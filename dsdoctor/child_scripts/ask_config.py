"""Print what the DeepSpeed of this interpreter makes of a configuration. The request is JSON in DSDOCTOR_CONFIG_0, _1, ...

The request: config (None asks for what DeepSpeed knows only), world (data-parallel ranks, None for unknown), ranks (all of them),
source (a folder to import DeepSpeed from), arguments (a file of TrainingArguments), accelerate (a file), model (a folder or file
that transformers reads), engine (False: none is made of it).
Trains nothing, compiles nothing, writes nothing. The answer is one line of JSON.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import warnings

sys.dont_write_bytecode = True
import config_facts as facts  # noqa: E402
import config_keys as keys  # noqa: E402


def request():
    pieces = itertools.takewhile(
        lambda piece: piece is not None, (os.environ.pop(f"DSDOCTOR_CONFIG_{n}", None) for n in itertools.count())
    )
    return json.loads("".join(pieces))


def pretend(world):
    """So many ranks, none of which is started. This process ends with the answer."""
    from deepspeed import comm

    comm.get_rank = lambda *_, **__: 0
    comm.get_world_size = lambda *_, **__: world


def smallest_world(config):
    """The number of ranks that the three batch sizes imply; 1 where they leave it open."""
    sizes = [config.get(name) for name in keys.BATCH]
    if all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        train, micro, accumulation = sizes
        return max(1, train // (micro * accumulation))
    return 1


def sequence_ranks(config):
    """Ranks that share one sample: DeepSpeed divides all ranks by them."""
    size = config.get("sequence_parallel_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def shared_by(config):
    """Ranks that share one sample or one model: DeepSpeed's batch sizes count them as one."""
    tensor = keys.lookup(config, ("tensor_parallel", "autotp_size"))
    return sequence_ranks(config) * (tensor if isinstance(tensor, int) and tensor > 1 else 1)


def all_ranks(config, world, ranks):
    """All ranks, where somebody says how many, or the three batch sizes do; else 1."""
    if ranks:
        return ranks
    known = world or (smallest_world(config) if all(name in config for name in keys.BATCH) else None)
    return known * shared_by(config) if known else 1


def failure(error):
    return f"{type(error).__name__}: {error}"


def filled_by(asked, answer):
    """The configuration with its "auto" filled in, where somebody is named who does that."""
    config, world = asked["config"], asked["world"] or asked.get("ranks")
    if not (asked["arguments"] or asked["accelerate"]):
        return config
    try:
        import config_fill as fill

        model = fill.model_of(asked["model"])
        if asked["accelerate"]:
            filled, facts = fill.fill_by_accelerate(config, asked["accelerate"], model)
            answer["accelerate"] = facts
            world = world or facts["processes"]
        if asked["arguments"]:
            given = fill.read_arguments(asked["arguments"])
            filled = fill.fill_by_trainer(config, given, world, model)
        answer["filled"] = filled.answer()
        answer["world"] = world
        return filled.config
    except Exception as error:
        answer["not_filled"] = failure(error)
        return config


def parameters_of(path):
    """How many parameters a model of that configuration has; it is made without memory for them."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())


def main():
    asked = request()
    if asked["source"]:
        sys.path.insert(0, asked["source"])
    # transformers, accelerate and DeepSpeed talk while they are imported
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        answer = {
            "version": deepspeed.__version__.strip(),
            "location": os.path.dirname(deepspeed.__file__),
            "world": asked["world"],
        }
        pretend(1)
        sections, by_model = keys.sections()
        answer["sections"] = sections
        answer["removed"] = keys.removed(sections)
        import config_optimizer as optimizer
        import config_stages as stages

        answer["names"] = optimizer.names()
        answer["stages"] = stages.of_fields(os.path.dirname(deepspeed.__file__), by_model)
        if asked["config"] is not None:
            judge(asked, answer, by_model, optimizer)
        if asked["model"]:
            try:
                answer["parameters"] = parameters_of(asked["model"])
            except Exception as error:
                answer["not_asked"] = failure(error)
    print("DSDOCTOR " + json.dumps(finite(answer)))


def finite(value):
    """JSON has no infinity, which accelerate writes into steps_per_print."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_auto_sizes(config):
    """A batch size that is "auto" is left to whoever fills it in: text could only be refused."""
    return {key: value for key, value in config.items() if key not in keys.BATCH or value != "auto"}


def judge(asked, answer, by_model, optimizer):
    config = filled_by(asked, answer)
    answer["config"] = config
    sized = without_auto_sizes(config)
    if "filled" in answer or len(sized) < len(config):
        keys.keep_a_batch_size(sized)
    if not answer["world"] and asked.get("ranks"):
        answer["world"] = max(1, asked["ranks"] // shared_by(config))
    pretend((answer["world"] or smallest_world(config)) * sequence_ranks(config))
    made, answer["refusals"] = keys.judge(sized, by_model)
    if made is None:
        return
    answer["facts"] = facts.of(made)
    optimizer.leave_ops_out()
    join_alone()
    try:
        answer.update(optimizer.ask(made, config))
        if asked.get("engine", True):
            try_engine(asked, config, answer)
    except Exception as error:
        answer["not_asked"] = failure(error)


def join_alone():
    """Some optimizers ask for the ranks they will talk to; where there can be no group, they are not judged."""
    import config_engine

    with contextlib.suppress(Exception):
        config_engine.join()


def try_engine(asked, config, answer):
    """What deepspeed.initialize refuses beyond DeepSpeedConfig; changes the answer."""
    import config_engine

    pretend(1)
    refused = [path for each in answer["refusals"] for path in each["paths"]]
    try:
        ranks = all_ranks(config, answer["world"], asked.get("ranks"))
        found, answer["not_tried"] = config_engine.ask(config, refused, answer["facts"], answer["optimizer"], ranks)
    except Exception as error:
        found, answer["not_tried"] = [], failure(error)
    answer["refusals"] += found


if __name__ == "__main__":
    main()
