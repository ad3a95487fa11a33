"""A tag and the universal one made of it -> whether each parameter's weights and optimizer states are the same, bit by bit."""

from collections.abc import Callable, Iterator

from dsdoctor.checkpoint.examine import Examined
from dsdoctor.checkpoint.flat_weights import trained, whole
from dsdoctor.checkpoint.inert import ITEM_SIZES
from dsdoctor.checkpoint.open_files import OpenFiles, Piece
from dsdoctor.checkpoint.universal import STATES
from dsdoctor.checkpoint.walk import tensors

Made = dict[tuple[str, str], tuple[str, Piece]]
"""(parameter, state) -> type and elements of what the converter wrote."""
Read = Callable[[int], None]


def differences(source: Examined, made: Examined, read: Read) -> Iterator[str]:
    """A line for each parameter that is not there or not the same. ``read`` is told the bytes of the source that were read.

    Weights that are cut over several ranks are put together by rules of their own, which are not judged.
    """
    there = _made(made)
    if (source.facts.tensor or 1) > 1:
        return
    with OpenFiles() as files:
        for state in STATES:
            for name, _, dtype, pieces in trained(source, state):
                reason = _of_parameter(files, pieces, dtype, there.get((name, state)), read)
                if reason:
                    yield f"{state} of {name}: {reason}"


def _made(made: Examined) -> Made:
    found: Made = {}
    for parameter in made.tag.parameters or ():
        for file in parameter.files:
            for _, tensor in tensors(file.content):
                if file.path.stem in STATES:
                    found[parameter.name, file.path.stem] = (tensor.dtype, whole(file, parameter.name, tensor))
    return found


def _of_parameter(
    files: OpenFiles, pieces: tuple[Piece, ...], dtype: str, there: tuple[str, Piece] | None, read: Read
) -> str:
    if there is None:
        return "it is not there"
    made_dtype, made = there
    count = sum(piece.count for piece in pieces)
    if (made_dtype, made.count) != (dtype, count):
        return f"{made.count:,} elements of {made_dtype}, and {count:,} of {dtype} were saved"
    place, width = made.start, ITEM_SIZES[dtype]
    for piece in pieces:
        for content in files.read(piece, width):
            size = len(content) // width
            same = b"".join(files.read(Piece(file=made.file, key=made.key, start=place, count=size), width))
            if content != same:
                return "other values than were saved"
            place += size
            read(len(content))
    return ""
