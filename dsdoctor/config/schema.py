"""The JSON schema of ds_config.json for one release of DeepSpeed: completion and red lines in editors.

https://json-schema.org/draft-07/schema: what VS Code and others read.
"""

import json
from typing import Any

from dsdoctor.config.answer import Asked, Key, KeyPath, Section
from dsdoctor.config.keys import OWNERS, REMARK_PREFIXES
from dsdoctor.config.values import NUMBERS

DRAFT = "http://json-schema.org/draft-07/schema#"
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array"}
AUTO = {"const": "auto"}
STAGES = {"1 and 2": "Read at stages 1 and 2.", "3": "Read at stage 3."}


def json_schema(asked: Asked) -> dict[str, Any]:
    """The schema of what a release answered that it reads."""
    schema = _object(asked, ())
    schema["properties"].update(dict.fromkeys(OWNERS, True))
    schema["properties"]["$schema"] = {"type": "string"}
    return {
        "$schema": DRAFT,
        "title": f"ds_config.json of DeepSpeed {asked.version}",
        **schema,
    }


def _object(asked: Asked, path: KeyPath) -> dict[str, Any]:
    section = asked.section(path)
    assert section is not None, path
    inner = {each.path[-1] for each in asked.sections if each.path and each.path[:-1] == path}
    properties: dict[str, Any] = {}
    for key in section.keys:
        if path or key.name not in asked.removed:
            properties.update({name: _key(asked, section, key) for name in (key.name, key.also) if name})
    for name in sorted(inner):
        described = {
            key: value for key, value in properties.get(name, {}).items() if key in {"description", "deprecated"}
        }
        properties[name] = {**described, "anyOf": [_object(asked, (*path, name)), AUTO, {"type": "null"}]}
    if path == ("optimizer",):
        properties["type"] = _names((*asked.names.optimizers, *asked.names.torch_optimizers))
    elif path == ("scheduler",):
        properties["type"] = _names((*asked.names.schedulers, *asked.names.torch_schedulers))
    remarks = {} if section.model else {"patternProperties": {f"^({'|'.join(map(_escaped, REMARK_PREFIXES))})": True}}
    is_open = section.open or path in {("optimizer", "params"), ("scheduler", "params")}
    return {"type": "object", "properties": properties, **remarks, "additionalProperties": is_open}


def _key(asked: Asked, section: Section, key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if kind := _type((*section.path, key.name), key):
        schema["anyOf"] = [kind, AUTO]
    if key.default:
        schema["default"] = json.loads(key.default)
    stages = asked.stages.get(key.name, ()) if section.path == ("zero_optimization",) else ()
    words = [STAGES[stage] for stage in stages if stage in STAGES] if len(stages) == 1 else []
    if key.deprecated:
        schema["deprecated"] = True
        words.append(f"Deprecated: use {key.instead}." if key.instead else "Deprecated.")
    if words:
        schema["description"] = " ".join(words)
    return schema


def _type(path: KeyPath, key: Key) -> dict[str, Any] | None:
    """The type of a value; None where only DeepSpeed can tell."""
    kind, optional = NUMBERS.get(path, key.kind), False
    if kind.startswith("Optional[") and kind.endswith("]"):
        kind, optional = kind.removeprefix("Optional[")[:-1], True
    if kind.startswith("one of "):
        schema: dict[str, Any] = {"enum": json.loads(f"[{kind.removeprefix('one of ')}]")}
    elif kind in TYPES:
        # 2e8 is an integer of JSON schema too; true is none, though pydantic takes it
        schema = {"type": TYPES[kind]}
    else:
        return None
    return {"anyOf": [schema, {"type": "null"}]} if optional or key.default == "null" else schema


def _names(names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [{"enum": sorted(set(names))}, {"type": "string"}]}


def _escaped(prefix: str) -> str:
    return prefix.replace("$", r"\$")
