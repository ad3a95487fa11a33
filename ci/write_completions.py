"""What completes dsdoctor in bash, zsh and fish -> completions/, which the wheel puts where shells look.

    python ci/write_completions.py     after a command or an option has changed

tests/test_package.py tells when it is due. ``dsdoctor --install-completion`` makes the same for the shell of a user.
"""

from pathlib import Path

from dsdoctor.cli.app import completion

FOLDER = Path(__file__).resolve().parents[1] / "completions"
FILES = {"bash": "dsdoctor", "zsh": "_dsdoctor", "fish": "dsdoctor.fish"}


def main() -> None:
    """Write all three."""
    FOLDER.mkdir(exist_ok=True)
    for shell, name in FILES.items():
        (FOLDER / name).write_text(completion(shell).rstrip() + "\n", encoding="utf-8")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
