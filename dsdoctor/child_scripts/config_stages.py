"""At which ZeRO stages DeepSpeed reads which field of zero_optimization: parsed from its own source. Imported by ask_config.py.

The engine builds its ZeRO optimizer in one function, with one branch for stages 1 and 2 and one for stage 3. A field that only one
branch reads, and nothing else outside the files of those stages, does nothing at the others.
"""

import _io
import ast
import os
import re

open_file = _io.open
"""This runs in a script's process, too, which may have put another one in the place of ``io.open``."""

ENGINE = os.path.join("runtime", "engine.py")
BUILDER = "_configure_zero_optimizer"
LOW, HIGH, ANY = "1 and 2", "3", "any"
FILES = {
    LOW: (os.path.join("runtime", "zero", "stage_1_and_2.py"),),
    HIGH: tuple(
        os.path.join("runtime", "zero", name)
        for name in ("stage3.py", "partition_parameters.py", "parameter_offload.py", "partitioned_param_coordinator.py")
    )
    + (os.path.join("runtime", "swap_tensor", "partitioned_param_swapper.py"),),
}
READ = re.compile(r"zero_config\.(\w+)|zero_config, *[\"'](\w+)[\"']")


def of_fields(folder, by_model):
    """Field -> the stages at which it is read ("1 and 2", "3", or "any"); nothing for a field that could not be followed."""
    model = by_model.get(("zero_optimization",))
    if model is None:
        return {}
    found = {name: set() for name in model.model_fields}
    try:
        with open_file(os.path.join(folder, ENGINE), encoding="utf-8") as file:
            text = file.read()
        read_engine(text, found)
        read_files(folder, found)
    except (OSError, SyntaxError, StopIteration):
        return {}
    return {model.model_fields[name].alias or name: sorted(stages) for name, stages in found.items() if stages}


def read_engine(text, found):
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    accessors = {}
    for function in functions:
        fields = fields_in(function)
        # a method that only hands a field out is read where it is called
        if function.name.startswith("zero_") or function.name == "super_offload":
            accessors.setdefault(function.name, set()).update(fields)
    for function in functions:
        if function.name in accessors:
            continue
        for node, stage in parts(function):
            for field in fields_in(node) | {field for name in calls_in(node) for field in accessors.get(name, ())}:
                if field in found:
                    found[field].add(stage)


def parts(function):
    """The nodes of a function with the stages for which they run."""
    if function.name != BUILDER:
        return [(function, ANY)]
    branch = next(
        node for node in ast.walk(function) if isinstance(node, ast.If) and "zero_stage <=" in ast.unparse(node.test)
    )
    rest = [(node, ANY) for node in function.body if node is not branch]
    return [*rest, *((node, LOW) for node in branch.body), *((node, HIGH) for node in branch.orelse)]


def fields_in(node):
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Attribute)
        and each.value.attr == "zero_config"
    } | {
        each.args[1].value
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name)
        and each.func.id == "getattr"
        and len(each.args) > 1
        and isinstance(each.args[1], ast.Constant)
        and ast.unparse(each.args[0]).endswith("zero_config")
    }


def calls_in(node):
    return {
        each.func.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and isinstance(each.func.value, ast.Name)
    }


def read_files(folder, found):
    known = {name: stage for stage, names in FILES.items() for name in names}
    for top, _, names in os.walk(os.path.join(folder, "runtime")):
        for name in names:
            path = os.path.join(top, name)
            relative = os.path.relpath(path, folder)
            if not name.endswith(".py") or relative == ENGINE:
                continue
            with open_file(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            for match in READ.finditer(text):
                field = match[1] or match[2]
                if field in found:
                    found[field].add(known.get(relative, ANY))
