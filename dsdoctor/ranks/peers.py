"""What libraries say when another rank is gone. Standard library alone."""

import re

PEER = re.compile(r"(closed|reset) by peer|Broken pipe|remote (process|worker)", re.IGNORECASE)


def says_another_is_gone(failure: str) -> bool:
    """Whether an exception, as a line, only says that another rank is gone.

    >>> says_another_is_gone("RuntimeError: Connection closed by peer [127.0.0.1]:18337"), says_another_is_gone("KeyError: 'x'")
    (True, False)
    """
    return PEER.search(failure) is not None
