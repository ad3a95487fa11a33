"""JSON in and out, where text and names may be anybody's: what is malformed is one kind of error, and any name can be written.

msgspec is imported with the first document: a check has asked its questions by then.
"""

from typing import Any, Literal, TypeVar

T = TypeVar("T")


def decode(text: bytes | str, kind: type[T]) -> T:
    """Read JSON into checked data. Raises msgspec.DecodeError for what is malformed, no UTF-8, or nested too deeply.

    >>> decode(b"[" * 200_000, object)
    Traceback (most recent call last):
    msgspec.DecodeError: it is nested too deeply
    """
    import msgspec

    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason if hasattr(error, 'reason') else error}") from None


def encode(value: Any, *, order: Literal["sorted"] | None = None) -> bytes:
    r"""Write data as JSON. Bytes of a file's name that are no UTF-8 are written as the terminal shows them.

    >>> encode({"file": "wei\udcdf"})
    b'{"file":"wei\\\\udcdf"}'
    """
    import msgspec

    try:
        return msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(value)), order=order)


def _writable(value: Any) -> Any:
    """Plain data with every string and key in a form that UTF-8 has."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(name): _writable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
