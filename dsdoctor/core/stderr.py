"""Lines of dsdoctor's own beside a script, on its stderr: one that is gone or broken costs the script nothing."""

import os
import sys


def write_stderr(text: str) -> None:
    """Write to the script's stderr.

    A script may have set ``sys.stderr`` to None (then ``print`` would take stdout), closed it or put an object of its own there,
    whoever reads it may have gone, and the disk below it may be full.
    """
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:
        return
    try:
        if own is not None and stream is own:
            # past its buffer: what stays there on a full disk would give the script Python's exit status 120
            own.flush()
            os.write(own.fileno(), text.encode(own.encoding, "backslashreplace"))
        else:
            stream.write(text)
            stream.flush()
    except Exception:  # the object is the script's: it may raise anything, and nothing of that is the training's matter
        return
