"""Run by the training's Python: many models followed by `ask_model.py`, transformers imported once. Argument: the child scripts'
folder; stdin: wishes. A line for each."""

import contextlib
import io
import json
import sys


def main():
    sys.path.insert(0, sys.argv[1])
    import ask_model

    for wish in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()):
            told = ask_model.answered(wish)
        print(json.dumps(told))


if __name__ == "__main__":
    main()
