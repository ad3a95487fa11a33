"""Which keys the DeepSpeed of this interpreter reads, and what it refuses. Imported by ask_config.py; changes nothing of DeepSpeed.

DeepSpeedConfig is handed a dict that notes each key that is asked for, with the default that is given. Sections that become
a pydantic model tell their fields themselves. So nothing here knows a key by name, but for what it takes to have a section
read.
"""

import enum
import json

MISSING = object()
PROBE = "dsdoctor_probe"
BASE = {"train_micro_batch_size_per_gpu": 1}
"""Without a batch size DeepSpeed refuses every configuration."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MAX_REFUSALS = 100
MAX_DEPTH = 4


class Notes:
    """What was asked of the dicts at each path."""

    def __init__(self):
        self.defaults = {}
        self.open = set()

    def read(self, path, key, default):
        known = self.defaults.setdefault(path, {})
        if known.get(key, MISSING) is MISSING:
            known[key] = default


class Keys:
    """``watching.keys()``: a question for a key in it is a question like any other."""

    def __init__(self, owner):
        self.owner = owner

    def __contains__(self, key):
        return key in self.owner

    def __iter__(self):
        return dict.__iter__(self.owner)

    def __len__(self):
        return len(self.owner)


class Watching(dict):
    """A dict that notes what is asked of it and of the dicts in it. Being spread (``**``) it gives its content unnoticed."""

    def __init__(self, items, notes, path=()):
        super().__init__({key: wrapped(value, notes, (*path, key)) for key, value in items.items()})
        self.notes, self.path = notes, path
        notes.defaults.setdefault(path, {})

    def __getitem__(self, key):
        self.notes.read(self.path, key, MISSING)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.notes.read(self.path, key, MISSING)
        return super().__contains__(key)

    def __setitem__(self, key, value):
        super().__setitem__(key, wrapped(value, self.notes, (*self.path, key)))

    def get(self, key, default=None):
        self.notes.read(self.path, key, default)
        if super().__contains__(key):
            return super().__getitem__(key)
        return wrapped(default, self.notes, (*self.path, key))

    def pop(self, key, *default):
        self.notes.read(self.path, key, default[0] if default else MISSING)
        return super().pop(key, *default)

    def keys(self):
        return Keys(self)

    def items(self):
        self.notes.open.add(self.path)
        return super().items()

    def values(self):
        self.notes.open.add(self.path)
        return super().values()

    def __copy__(self):
        if not self.path:
            return self
        # whatever is in it may be read of the copy, by anybody
        self.notes.open.add(self.path)
        return plain(self)

    def __deepcopy__(self, memo):
        self.notes.open.add(self.path)
        return plain(self)

    def __reduce__(self):
        return dict, (plain(self),)


def wrapped(value, notes, path):
    return Watching(value, notes, path) if type(value) is dict else value


def plain(value):
    """The same without a watch."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in dict.items(value)}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def attempt(config, notes):
    """(the DeepSpeedConfig, None) or (None, why DeepSpeed refuses it)."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        return DeepSpeedConfig(Watching(plain(config), notes)), None
    except Exception as error:
        return None, error


def lines_of(error):
    """The single errors of pydantic's, none of another one."""
    try:
        return error.errors(include_url=False, include_context=False) if hasattr(error, "errors") else []
    except TypeError:
        return error.errors()


def nested(path, value):
    """A configuration with one value at a path."""
    for key in reversed(path):
        value = {key: value}
    return {**BASE, **value}


def models():
    """Every class of configuration sections, by name."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    found, todo = {}, [DeepSpeedConfigModel]
    while todo:
        todo += (below := todo.pop().__subclasses__())
        found.update({each.__name__: each for each in below})
    return found


def model_of(annotation):
    """The section's class in a field's type: X, or X | None."""
    if hasattr(annotation, "model_fields"):
        return annotation
    inner = [model_of(each) for each in getattr(annotation, "__args__", ())]
    return next((each for each in inner if each), None)


def explore():
    """(sections that are read by hand: path -> {key: default}, open paths, sections that are models: path -> class)."""
    notes, by_model = Notes(), {}
    attempt(BASE, notes)
    known, seen = models(), set()
    while todo := [path for path in paths_in(notes) if path not in seen and len(path) <= MAX_DEPTH]:
        for path in todo:
            seen.add(path)
            model = asked_model(path, known)
            if model:
                by_model.update(with_inner(path, model))
                continue
            for content in ({}, {"enabled": True}, {"type": "", "params": {}, "enabled": True}):
                attempt(nested(path, content), notes)
            # what is read only where something else is there too
            named = {key: {} for key, default in notes.defaults.get(path, {}).items() if default is MISSING}
            attempt(nested(path, {**named, "enabled": True}), notes)
    for path in [path for path in notes.defaults if path in by_model]:
        del notes.defaults[path]
    return notes, by_model


def paths_in(notes):
    """Where a section could stand: what is asked for without a default, or with a dict."""
    found = []
    for path, keys in list(notes.defaults.items()):
        found += [
            (*path, key)
            for key, default in keys.items()
            if default is MISSING or isinstance(default, dict) or default is None
        ]
    return found


def asked_model(path, known):
    """The class that refuses an unknown key at this path; None where none does."""
    _, error = attempt(nested(path, {PROBE: 1}), Notes())
    for line in lines_of(error):
        if line["loc"] and line["loc"][-1] == PROBE:
            model = known.get(error.title)
            for name in line["loc"][:-1]:
                model = model_of(field_of(model, name).annotation) if model else None
            return model
    return None


def field_of(model, name):
    """The field of that name or alias."""
    return model.model_fields.get(name) or next(field for field in model.model_fields.values() if field.alias == name)


def with_inner(path, model):
    """The section and those in it."""
    found = {path: model}
    for name, field in model.model_fields.items():
        inner = model_of(field.annotation)
        if inner:
            found.update(with_inner((*path, field.alias or name), inner))
    return found


def section_of_model(path, model):
    keys = []
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        keys.append(
            {
                "name": field.alias or name,
                "also": name if field.alias else "",
                "kind": type_name(field.annotation),
                "default": shown(default),
                "deprecated": bool(extra.get("deprecated")),
                "instead": str(extra.get("new_param", "")),
            }
        )
    return {"path": list(path), "model": model.__name__, "open": False, "keys": keys}


def section_by_hand(path, keys, is_open):
    return {
        "path": list(path),
        "model": "",
        "open": is_open,
        "keys": [
            {"name": key, "kind": kind_of(default), "default": shown(default)}
            for key, default in keys.items()
            if isinstance(key, str) and key != PROBE
        ],
    }


def kind_of(default):
    """What a default tells of the values: "" for nothing."""
    if default is MISSING or default is None:
        return ""
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (dict, "dict"), (list, "list")):
        if isinstance(default, kind):
            return name
    return ""


def type_name(annotation):
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return "one of " + ", ".join(
                json.dumps(each) for each in dict.fromkeys(member.value for member in annotation)
            )
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def shown(value):
    """A default as JSON text; "" where it is none that could be written."""
    if value is MISSING:
        return ""
    if isinstance(value, enum.Enum):
        value = value.value
    try:
        # DeepSpeed's own ints print with commas
        return json.dumps(int(value) if type(value).__name__ == "pp_int" else value)
    except (TypeError, ValueError):
        return ""


def sections():
    """Every place where keys stand, as DeepSpeed reads it."""
    notes, by_model = explore()
    by_hand = {path: keys for path, keys in notes.defaults.items() if not path or keys or path in notes.open}
    return [
        *(section_by_hand(path, keys, path in notes.open) for path, keys in by_hand.items()),
        *(section_of_model(path, model) for path, model in by_model.items()),
    ], by_model


def judge(config, by_model):
    """(what DeepSpeed makes of it or None, what it refuses). A refused part is taken out, and the rest is judged again."""
    config, found = plain(config), []
    if not any(name in config for name in BATCH[:2]):
        made, error = attempt(config, Notes())
        if made is not None:  # elastic training, which releases before 0.19 have, computes them
            return made, found
        keep_a_batch_size(config)
        if attempt(config, Notes())[0] is not None:
            found.append({"paths": [], "kind": "no batch size", "message": str(error), "model": ""})
    for _ in range(MAX_REFUSALS):
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


def removed(sections):
    """Keys at the top whose presence alone is refused."""
    found = {}
    for key in [each["name"] for section in sections if not section["path"] for each in section["keys"]]:
        told = [str(attempt({**BASE, key: value}, Notes())[1]) for value in (None, {}, False)]
        if told[0] != "None" and len(set(told)) == 1 and "removed" in told[0]:
            found[key] = told[0]
    return found
