"""What the parameters of an optimizer's or a scheduler's class take, and what DeepSpeed's log says while one is made.

Imported by config_optimizer.py; changes nothing of DeepSpeed. Three places tell of what kind a parameter is: its default, its
annotation, and the class's documentation. Which words it takes tell a Literal, or the words that DeepSpeed does not warn of.
"""

import contextlib
import inspect
import logging
import re
import sys

KINDS = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), ((list, tuple), "list"))
WORDS = {"bool": "bool", "int": "int", "float": "float", "str": "str", "Literal": "str"} | dict.fromkeys(
    ("list", "tuple", "Iterable", "Sequence"), "list"
)
DOCUMENTED = re.compile(r"^\s*(\w+)\s*\(([\w ,]+)\)\s*:", re.MULTILINE)
LITERAL = re.compile(r"Literal\[([^\]]*)\]")


def parameters_of(function):
    """The parameters that can be named, but the first, which is what is optimized."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each for each in list(inspect.signature(function).parameters.values())[2:] if each.kind in named]


def kinds_of(kind):
    """Parameter -> of what kind it is: bool, int, float, str, list, or "" where nothing tells."""
    documented = dict(DOCUMENTED.findall(f"{kind.__doc__ or ''}\n{kind.__init__.__doc__ or ''}"))
    return {
        each.name: of_default(each.default) or of_words(annotation(each)) or of_words(documented.get(each.name, ""))
        for each in parameters_of(kind.__init__)
    }


def of_default(default):
    return next((name for types, name in KINDS if isinstance(default, types)), "")


def of_words(text):
    """The kind that an annotation or a line of documentation names first; text wherever text is among them."""
    words = re.findall(r"[A-Za-z]+", text)
    if "str" in words or "Literal" in words or "Callable" in words:
        return "str" if "Callable" not in words else ""
    return next((WORDS[word] for word in words if word in WORDS), "")


def annotation(parameter):
    found = parameter.annotation
    return "" if found is parameter.empty else found.__name__ if isinstance(found, type) else str(found)


def choices_of(kind):
    """Parameter -> the words that its annotation lists."""
    found = {each.name: LITERAL.search(annotation(each)) for each in parameters_of(kind.__init__)}
    return {name: re.findall(r"'([^']*)'", listed[1]) for name, listed in found.items() if listed}


@contextlib.contextmanager
def heard_warnings():
    """The warnings that DeepSpeed logs meanwhile."""
    from deepspeed.utils import logger

    heard = []

    class Hearing(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    before, disabled, level = logger.handlers, logger.manager.disable, logger.level
    logger.handlers = [Hearing(logging.WARNING)]
    logger.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    try:
        yield heard
    finally:
        logger.handlers = before
        logger.setLevel(level)
        logging.disable(disabled)


def warnings_of(make):
    """What DeepSpeed warns of while something is made; None where it cannot be made."""
    with heard_warnings() as heard:
        try:
            make()
        except Exception:
            return None
    return heard


def warned(params, make):
    """[{parameter, message, choices}]: warnings that a parameter's value causes. ``make`` takes parameters and makes the thing."""
    found = []
    for message in dict.fromkeys(warnings_of(lambda: make(params)) or []):
        for name in params:
            without = warnings_of(lambda name=name: make({key: each for key, each in params.items() if key != name}))
            if without is not None and message not in without:
                found.append({"parameter": name, "message": message, "choices": words_without(params, name, make)})
                break
    return found


def words_without(params, name, make):
    """The words among the constants of DeepSpeed's schedules of which nothing is said; none where the value is no word."""
    if not isinstance(params[name], str):
        return []
    module = sys.modules["deepspeed.runtime.lr_schedules"]
    constants = {value for value in vars(module).values() if isinstance(value, str) and value.isidentifier()}
    plain = warnings_of(lambda: make({key: value for key, value in params.items() if key != name})) or []
    return sorted(word for word in constants if warnings_of(lambda word=word: make({**params, name: word})) == plain)
