"""Run by the training's Python: many configurations, DeepSpeed imported once. Argument: the child scripts' folder; stdin: requests.

Each answer is what `ask_config.py` prints for one request, less what is the same for all: that is the first line.
"""

import contextlib
import io
import json
import logging
import sys
from pathlib import Path


def main():
    sys.path.insert(0, sys.argv[1])
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        import ask_config
        import config_keys
        import config_optimizer
        import config_stages
        import deepspeed

        ask_config.pretend(1)
        sections, by_model = config_keys.sections()
        folder = str(Path(deepspeed.__file__).parent)
        first = {
            "version": deepspeed.__version__,
            "sections": sections,
            "removed": config_keys.removed(sections),
            "names": config_optimizer.names(),
            "stages": config_stages.of_fields(folder, by_model),
        }
    print(json.dumps(ask_config.finite(first)))
    for request in json.load(sys.stdin):
        answer = {"version": deepspeed.__version__, "world": request["world"]}
        with contextlib.redirect_stdout(io.StringIO()):
            ask_config.judge(request, answer, by_model, config_optimizer)
        print(json.dumps(ask_config.finite(answer)))


if __name__ == "__main__":
    main()
