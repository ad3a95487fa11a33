"""Write down what the installed DeepSpeed answers, for the quick tests: python tests/config/record_answer.py"""

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.config.many import ask_many

RECORDED = Path(__file__).with_name("answer.json")


def main() -> None:
    """The answer to a configuration without a mistake."""
    asked = ask_many([{"train_batch_size": 8}])[0]
    RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(asked), indent=0) + b"\n")


if __name__ == "__main__":
    main()
