"""What stands before the words of a linker."""


def linker(most: int = 80) -> str:
    """A pattern for a linker's name and what it says, up to ``most`` characters, before what is searched.

    >>> import re
    >>> [bool(re.search(linker() + "-laio", line)) for line in (
    ...     "/usr/bin/ld: cannot find -laio: No such file or directory",
    ...     "ld.lld: error: unable to find library -laio",
    ...     "gcc -shared -laio",
    ... )]
    [True, True, False]
    """
    # why it may not go past the next name: a line of a thousand names would be searched a thousand times
    name = r"ld(?:\.\w{1,8}){0,2}: "
    return rf"{name}(?:[^l]|l(?!{name[1:]})){{0,{most}}}?"
