"""``python -m dsdoctor.comm``: the command `comm`, under a launcher or by itself. A door of the hall that stands in this room."""

import sys

from dsdoctor.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["comm"]
    main()
