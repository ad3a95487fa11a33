"""A line of a traceback -> the place it names: as Python prints it, rich in a box, a notebook of today and of old.

Nothing else is read from it; which lines belong to a traceback is known elsewhere.
"""

import re
from dataclasses import replace

from dsdoctor.diagnosis.failures import Frame

FRAME = re.compile(
    r"File \"(?P<path>[^\"]{1,400})\", line (?P<line>\d{1,7})(?:, in (?P<function>\S{1,120}))?"
    r"|File (?P<path_n>[^\s:\"]{1,300}):(?P<line_n>\d{1,7}), in (?P<function_n>[\w.<>]{1,120})"  # a notebook
    r"|(?P<path_o>[/~.][^\s:\"]{1,300}\.py|<ipython-input-[\w-]{1,60}>) in (?P<function_o>[\w<>]{1,120})"  # an old one
    r"|(?P<path_r>[/~.\w][^\s:\"]{0,300}\.\w{1,4}):(?P<line_r>\d{1,7}) in (?P<function_r>[\w.<>]{1,120})"  # rich
    r"|(?P<path_c>(?:Cell|Input) In ?\[\d{1,6}\])(?:, line (?P<line_c>\d{1,7})|(?=, in ))"  # a cell of a notebook
    r"(?:, in (?:<cell line: (?P<line_d>\d{1,7})>|(?P<function_c>[\w.<>]{1,120})))?"
)
POINTED_AT = re.compile(r"(?:❱|-{1,6}>) ?(?P<line>\d{1,7})[ │|]{0,40}(?P<source>.{0,200}?)[ │|]{0,200}$")
"""The line of source that rich and notebooks point at."""

NUMBERED = re.compile(r"\d{1,7}(?: {2,}| ?[│|])")
"""Another line of source, as rich and notebooks show them around that one."""

NUMBERED_AT_THE_TOP = re.compile(r"\d{1,7} \S")
"""A line of source that is not indented, as notebooks show it."""

BAR = re.compile(r"[|│] ?")
"""What stands before the lines of a group of exceptions, and of a box."""


def without_bar(text: str) -> str:
    """A line of a box or of a group, without its border."""
    found = BAR.match(text)
    return text[found.end() :].lstrip() if found else text


def frame_of(text: str) -> Frame | None:
    """The place that a line names; its line is 0 where the next lines tell it.

    >>> str(frame_of('File "/w/a.py", line 7, in main')), str(frame_of("File /w/a.py:7, in Table.read(self)"))
    ('/w/a.py:7 main', '/w/a.py:7 Table.read')
    >>> str(frame_of("/w/a.py:7 in main     │")), str(frame_of("/w/a.py in main(x)")), frame_of("at /w/a.py")
    ('/w/a.py:7 main', '/w/a.py main', None)
    >>> str(frame_of("Cell In[5], line 9, in step(batch)")), str(frame_of("Input In [5], in <cell line: 3>()"))
    ('Cell In[5]:9 step', 'Input In [5]:3 <module>')
    """
    found = FRAME.match(text)
    if not found:
        return None
    groups = found.groupdict()
    path, line, function = (
        next((groups[name + kind] for kind in ("", "_n", "_o", "_r", "_c", "_d") if groups.get(name + kind)), "")
        for name in ("path", "line", "function")
    )
    return Frame(path=path, line=int(line or 0), function=function or "<module>")


def shows_numbers(text: str) -> bool:
    """Whether lines of source behind such a frame have numbers.

    >>> shows_numbers("Cell In[5], line 9, in step(batch)"), shows_numbers('File "/w/a.py", line 7, in main')
    (True, False)
    """
    return not text.startswith('File "')


def pointed_at(text: str, frame: Frame) -> Frame | None:
    """The frame with its line of source, where a line points at it.

    >>> frame = Frame(path="/w/a.py", line=0, function="main")
    >>> pointed_at("---> 61     row = rows[key]", frame), pointed_at("60     def f():", frame)
    (Frame(path='/w/a.py', line=61, function='main', source='row = rows[key]'), None)
    """
    found = POINTED_AT.match(text)
    return replace(frame, line=frame.line or int(found["line"]), source=found["source"].strip()) if found else None
