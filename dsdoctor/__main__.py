"""``python -m dsdoctor``: the command line."""

from dsdoctor.cli import main

if __name__ == "__main__":
    main()
