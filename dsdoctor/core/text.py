"""The manual page of a rule: text in four fixed parts -> a page, and a page -> lines. Data only.

Whoever writes a rule writes its page as plain text, most often a docstring::

    What it means, in a line.

    More of what it means, where there is more.

    Why it matters: what goes wrong for the user, and when.

    How to fix it: one or two sentences.

        $ a command that can be pasted

    Since: 0.1
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

PART = re.compile(r"^(Why it matters|How to fix it|Since): *", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ManualPage:
    """What a rule means, why that matters, how to fix it, and the first version of dsdoctor that has the rule."""

    means: str
    why: str
    fix: str
    since: str


NAMES = frozenset({"torch", "nvcc", "pip", "gloo", "dsdoctor", "gds", "setuptools", "libaio", "pdsh", "deepspeed"})
"""Words that stay small at the beginning of a sentence; so does whatever has a digit, a dot or an underscore in it."""


def parse_page(text: str) -> ManualPage:
    """A page of its text; a part that is not there is empty.

    >>> parse_page("nvcc is older than torch.\\n\\nWhy it matters: it fails.\\n\\nHow to fix it: take another.\\n\\nSince: 0.1")
    ManualPage(means='nvcc is older than torch.', why='it fails.', fix='take another.', since='0.1')
    """
    means, *rest = PART.split(text)
    parts = {name: textwrap.dedent(part).strip() for name, part in zip(rest[::2], rest[1::2], strict=True)}
    return ManualPage(
        means=means.strip(),
        why=parts.get("Why it matters", ""),
        fix=parts.get("How to fix it", ""),
        since=parts.get("Since", ""),
    )


def page_lines(page: ManualPage) -> Iterator[str]:
    """A page as it is printed: each part below its heading."""
    parts = {"What it means": page.means, "Why it matters": page.why, "How to fix it": page.fix}
    for heading, text in parts.items():
        if text:
            yield from (heading, *textwrap.indent(_sentence(text), "    ").splitlines(), "")
    yield f"Since dsdoctor {page.since}"


def _sentence(text: str) -> str:
    """A text that begins with a capital letter, unless its first word is a name.

    >>> _sentence("the rank died."), _sentence("torch is old."), _sentence("fp16 is narrow.")
    ('The rank died.', 'torch is old.', 'fp16 is narrow.')
    """
    first = text.split(maxsplit=1)[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() and first not in NAMES else text
