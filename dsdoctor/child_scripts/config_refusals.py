"""What the DeepSpeed of this interpreter refuses in a configuration, and which keys are to blame. Imported by ask_config.py.

A refused part is taken out and the rest asked again, so that every refusal is told and not only the first.
"""

from config_keys import BASE, MISSING, Notes, attempt, lines_of, plain

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MOST_REFUSALS = 100


def judge(config, by_model):
    """(what DeepSpeed makes of it or None, what it refuses). A refused part is taken out, and the rest is judged again."""
    config, found = plain(config), []
    if not any(name in config for name in BATCH[:2]):
        _, error = attempt(config, Notes())
        keep_a_batch_size(config)
        if attempt(config, Notes())[0] is not None:
            found.append({"paths": [], "kind": "no batch size", "message": str(error), "model": ""})
    for _ in range(MOST_REFUSALS):
        made, error = attempt(config, Notes())
        if made is not None:
            return made, found
        parts = refusals(config, error, by_model)
        found += parts
        taken = [remove(config, path) for part in parts for path in part["paths"]]
        if not any(taken):
            return None, found
        keep_a_batch_size(config)
    return None, found


def refusals(config, error, by_model):
    lines = lines_of(error)
    if not lines:
        return [{"paths": culprits(config, error), "kind": type(error).__name__, "message": str(error), "model": ""}]
    found = []
    tops = [path for path, model in by_model.items() if model.__name__ == error.title]
    # bf16 and bfloat16 are of one class
    top = next((path for path in tops if lookup(config, path)), ())
    for line in lines:
        path = located(config, line["loc"], top, by_model)
        paths = [path] if path else culprits(config, error, inside=top)
        found.append(
            {
                "paths": [list(each) for each in paths],
                "kind": line["type"],
                "message": line["msg"],
                "model": error.title,
            }
        )
    return found


def located(config, loc, top, by_model):
    """The path of a pydantic error in the configuration, whose keys may be names or aliases; None where there is none."""
    for start in (top, ()):
        path, here = list(start), lookup(config, start)
        for name in loc:
            if isinstance(here, dict) and name not in here:
                model = by_model.get(tuple(path))
                others = [(key, field.alias) for key, field in model.model_fields.items()] if model else []
                name = next((other for pair in others for other in pair if name in pair and other in here), name)
            if not isinstance(here, dict) or name not in here:
                break
            path.append(name)
            here = here[name]
        if len(path) > len(start):
            return path
    return None


def culprits(config, error, inside=()):
    """The keys without each of which DeepSpeed does not say this."""
    found = []
    holder = lookup(config, inside)
    for key in list(holder) if isinstance(holder, dict) else []:
        path = [*inside, key]
        less = plain(config)
        remove(less, path)
        keep_a_batch_size(less)
        _, other = attempt(less, Notes())
        if other is None or (type(other), str(other)) != (type(error), str(error)):
            value = lookup(config, path)
            deeper = culprits(config, error, path) if isinstance(value, dict) else []
            found += deeper or [path]
    return found


def keep_a_batch_size(config):
    if not any(name in config for name in BATCH[:2]):
        config.update(BASE)


def lookup(config, path):
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def remove(config, path):
    """Whether it was there."""
    holder = lookup(config, path[:-1])
    return isinstance(holder, dict) and holder.pop(path[-1], MISSING) is not MISSING
