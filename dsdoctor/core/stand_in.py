"""A function of ours in the place of a library's: what a script sees of it is the library's name, signature, file and line.

Only its stack shows us: what is called in the library's place has its own frame, in our file.
"""

import ast
import functools
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

OURS = f"{Path(__file__).parents[1]}/"
TEMPLATE = """
def stand_in(*args, **kwargs):
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        # a bare raise adds no entry for this frame (from Python 3.11 on)
        error.__traceback__ = without_ours(error.__traceback__)
        raise
"""
HOOKS = "_dsdoctor_hooks"
"""The attribute of a method that stands in for a class's own."""


def standing_for(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does as ``call``, and looks like ``original``. What it raises has the library's traceback, without ours."""
    of_original = getattr(original, "__code__", None)
    file, line = (of_original.co_filename, of_original.co_firstlineno) if of_original else (__file__, 1)
    made = FunctionType(_code(file, line), {"call": call})
    made.__globals__["without_ours"] = functools.partial(_without_ours, made.__code__)
    functools.update_wrapper(made, original)
    try:
        # without it inspect.getfullargspec would show `*args`
        made.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of a function in C that has none
        return made
    return made


def _code(file: str, line: int) -> CodeType:
    tree = ast.parse(TEMPLATE)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            vars(node).update(lineno=line, end_lineno=line, col_offset=0, end_col_offset=0)
    codes = compile(tree, file, "exec").co_consts
    return next(each for each in codes if isinstance(each, CodeType))


def _without_ours(code: CodeType, trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the entries of ours that it begins with; whole where there is nothing else."""
    inner = trace
    while inner is not None and (inner.tb_frame.f_code is code or inner.tb_frame.f_code.co_filename.startswith(OURS)):
        inner = inner.tb_next
    return inner or trace


def hook_method(instance: Any, name: str, around: Callable[..., Any]) -> Callable[[], None] | None:
    """Have ``around`` called in place of a method of one instance, with the method itself and its arguments, until what this
    returns is called. None where that cannot be done: the method is not a plain one of the instance's class.

    The instance has no new attribute, and a method that a script puts into the class later on is called as it would be without us.
    ``around`` is a bound method, and is held weakly: who owns it must live as long as it is to be called.
    """
    owner = next((each for each in type(instance).__mro__ if name in vars(each)), None)
    if owner is None or name in vars(instance) or not isinstance(vars(owner)[name], FunctionType):
        return None
    hooked: _Hooked = getattr(vars(owner)[name], HOOKS, None) or _Hooked(owner, name)
    hook = weakref.WeakMethod(around)
    try:
        hooked.hooks.setdefault(instance, []).append(hook)
    except TypeError:  # neither a key nor weakly held
        return None

    def undo() -> None:
        hooked.remove(instance, hook)

    return undo


class _Hooked:
    """A method of a class, and which instances have what called around it."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name, self.method = owner, name, vars(owner)[name]
        self.hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self.made = standing_for(self.method, self.call)
        setattr(self.made, HOOKS, self)
        setattr(owner, name, self.made)

    def call(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the method."""
        call: Callable[..., Any] = functools.partial(self.method, instance)
        for hook in tuple(self.hooks.get(instance, ())):
            if (around := hook()) is not None:
                call = functools.partial(around, call)
        return call(*args, **kwargs)

    def remove(self, instance: Any, hook: Any) -> None:
        """Without one of the hooks; after the last one the class is as it was."""
        mine = self.hooks.get(instance, [])
        if hook in mine:
            mine.remove(hook)
        if not mine:
            self.hooks.pop(instance, None)
        # what the script has put in its place meanwhile stays
        if not self.hooks and vars(self.owner).get(self.name) is self.made:
            setattr(self.owner, self.name, self.method)
