"""A table of cases as one test: every case is tried, and what is wrong is told with its name.

pytest needs three milliseconds for each test of its own, whatever it tests: a thousand cases are three seconds of nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LONGEST = 400
"""So many letters of a case's values are shown where it has no name."""


def each(
    names: str | tuple[str, ...], cases: Iterable[Any], *, ids: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``pytest.mark.parametrize`` in one test: same arguments, and it may be stacked; fixtures are made once for all cases."""
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(cases)

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**others: object) -> None:
            wrong = []
            for number, case in enumerate(table):
                values = dict(zip(arguments, case if len(arguments) > 1 else (case,), strict=True))
                try:
                    check(**values, **others)
                except AssertionError as error:
                    wrong.append(f"{ids[number] if ids else repr(values)[:LONGEST]}: {error}")
            if wrong:
                raise AssertionError(f"{len(wrong)} of {len(table)} cases are wrong:\n\n" + "\n\n".join(wrong))

        left = [one for name, one in inspect.signature(check).parameters.items() if name not in arguments]
        test.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return test

    return decorate
