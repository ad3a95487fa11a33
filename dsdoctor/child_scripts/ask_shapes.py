"""A Hugging Face configuration -> the names and shapes of its model's parameters. One argument: the file, or its folder.

The model is made on the meta device: it takes no memory for its weights. Nothing is fetched, no code of the folder is run.
"""

import contextlib
import io
import json
import logging
import sys

sys.dont_write_bytecode = True
import ask_model  # noqa: E402


def answer(place):
    import torch

    config = ask_model.configuration_of(place)
    with torch.device("meta"):
        model = ask_model.class_of(config)(config)
    shapes = {name: list(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    return {"class": type(model).__name__, "shapes": shapes}


def answered(place):
    """The answer, or why there is none."""
    try:
        return answer(place)
    except ImportError as error:
        return {"error": str(error), "missing": error.name or "torch"}
    except ask_model.Unknown as error:
        return {"error": str(error), "hint": error.hint}
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, str(error)[:2000])}


def main():
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        result = answered(sys.argv[1])
    print("DSDOCTOR " + json.dumps(result))


if __name__ == "__main__":
    main()
