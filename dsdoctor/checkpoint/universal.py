"""checkpoint --universal: DeepSpeed's own converter, with what it needs told before and what it made checked after, bit by bit.

It works in a hidden folder beside the one that is named, and what it made gets that name when everything in it was checked: a
kill, a full disk or an error leave nothing that a training could take for a checkpoint.

DeepSpeed's own tools open the files without ``weights_only``, and a pickle may name any function of the system: only classes and
functions that files of DeepSpeed's checkpoints name may be called there. Nothing of dsdoctor's calls one.
"""

import os
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.facts import PARTITIONED, STATE, Examined, examine
from dsdoctor.checkpoint.folder import Part, look, names_in, read_tag
from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES, at, count_of, tensors
from dsdoctor.checkpoint.judge import CheckpointOrder, Judged, judge_checkpoint
from dsdoctor.checkpoint.merge import Watching, whole_tag
from dsdoctor.checkpoint.tensor_bytes import Damaged, OpenFiles, Piece
from dsdoctor.checkpoint.torch_file import write_copy
from dsdoctor.checkpoint.weights import NotMerged, trained, whole
from dsdoctor.core.cgroups import free_memory
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan, UsageError, disk_full, is_full
from dsdoctor.core.files import check_folder, hidden_folder, is_this_user, make_folder, real_path, replacing, write_text
from dsdoctor.core.finding import step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import and_more
from dsdoctor.core.zip_file import BadZip

TRUSTED = re.compile(
    # how torch and Python write tensors, shapes, dictionaries and sets
    r"torch\.\w{1,20}Storage|torch\.Size|torch\.Tensor|torch\.device|torch\.(bfloat16|u?int\d{1,2}|float\d\w{0,12}|bool)"
    r"|torch\._utils\._rebuild_(tensor_v[23]|parameter|parameter_with_state)|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.nn\.parameter\.Parameter|torch\.storage\.UntypedStorage"
    r"|collections\.(OrderedDict|defaultdict)|(__builtin__|builtins)\.(set|frozenset|bytes|bytearray|complex|slice|dict|list|int)"
    # numpy's arrays and numbers: states of random generators
    r"|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)|_codecs\.encode"
    # plain data of DeepSpeed, and Megatron's arguments
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum|deepspeed\.runtime\.fp16\.loss_scaler\.\w{0,20}LossScaler"
    r"|deepspeed\.utils\.tensor_fragment\.fragment_address|argparse\.Namespace",
    re.ASCII,
)
SCRIPTED = "constants.pkl"
"""An entry that makes torch.load take a file for a program of TorchScript."""
STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""What the converter takes of each parameter, whatever the optimizer: ds_to_universal.py, extract_zero_shards."""
WIDTH = 4
IMPORTED_BYTES = 500 << 20
"""Bytes of a process that imported torch and DeepSpeed: 246 MiB were measured without a GPU, more where torch has CUDA."""
SMALL_FILE_BYTES = 8 << 10
"""A file of one small tensor: 1.3 kB of zip around it, in blocks of 4 kB."""
MAX_WORKERS = 4
Made = dict[tuple[str, str], tuple[str, Piece]]
"""(parameter, state) -> type and elements of what the converter wrote."""
Read = Callable[[int], None]
WORK = "universal"
MAX_LAST_LINES = 40
LATEST = "latest_universal"


def untrusted(examined: Examined) -> Iterator[tuple[str, str]]:
    """What is named besides: (the name, the file)."""
    for file in examined.tag.files:
        yield from ((name, file.path.name) for name in sorted(file.names) if not TRUSTED.fullmatch(name))
        if SCRIPTED in file.entries:
            yield "a TorchScript program", file.path.name


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, at most: ``disk`` while it runs, with the copies that the converter reads, ``result`` of it stay, ``memory`` of all
    processes. ``workers`` of them at once."""

    disk: int
    result: int
    memory: int
    workers: int


def amount(count: int) -> str:
    """Bytes for a reader.

    >>> amount(3 << 30), amount(3 << 20)
    ('3.00 GiB', '3.0 MiB')
    """
    if count >= 1 << 80:
        return "more than any disk has"
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def refusals(examined: Examined) -> Iterator[str]:
    """Why the converter is not started, each reason as a sentence."""
    facts = examined.facts
    if facts.universal:
        yield "it is already universal"
    elif facts.stage not in {1, 2, 3}:
        yield "without ZeRO, no optimizer state is sharded: it already loads with any number of ranks"
    elif facts.experts:
        yield "DeepSpeed's converter (0.19.8) joins the experts of all ranks into one, and fails"
    elif (facts.tensor or 1) > 1 and not facts.injected:
        yield "no file records how its tensors are sharded (universal_checkpoint_info), so the converter would join them wrongly"
    else:
        yield from _of_files(examined)


def _of_files(examined: Examined) -> Iterator[str]:
    known = {file.path.name for file in examined.tag.files}
    others = tuple(name for name in names_in(examined.tag.folder.path) if name.endswith(".pt") and name not in known)
    if others:
        # it takes every file by the end of its name
        yield f"the converter would also read {and_more(others, 3)}, which is not part of this tag: move it away"
    unknown = tuple(file.path.name for file in examined.tag.files if file.unknown)
    if unknown:
        yield f"{and_more(unknown, 3)} could not be read"
    for shard in examined.tag.of(Part.OPTIMIZER)[:1]:
        lacking = [name for name in STATES[1:] if not all(at(group, name) for group in _groups(shard.file.content))]
        if lacking:
            yield f"the converter needs Adam's states, but {shard.file.path.name} has no {' and no '.join(lacking)}"
    leading = sorted({name for shard in examined.tag.shards for name in _folder_names(shard.file.content)} - {""})
    if elsewhere := tuple(
        repr(name[:100]) for name in leading if PurePosixPath(name).parts != (name,) or name in {".", ".."}
    ):
        yield f"the converter creates a folder per parameter name, and these names lead outside: {and_more(elsewhere, 3)}"
    names = tuple(f"{name} in {file}" for name, file in untrusted(examined))
    if names:
        yield f"the converter opens files with weights_only=False, which runs code that they name: {and_more(names, 3)}"


def _folder_names(content: object) -> Iterator[str]:
    """The names of parameters and buffers in a file, wherever the converter takes them from."""
    groups = [at(content, "param_shapes"), at(content, STATE, "param_slice_mappings")]
    held = [at(content, "module"), at(content, "frozen_param_shapes"), at(content, "frozen_param_fragments")]
    held += [each for group in groups for each in (group if isinstance(group, list | tuple) else [group])]
    yield from (str(name) for each in held if isinstance(each, dict) for name in each)


def _groups(content: object) -> list[object]:
    """The optimizer's states of each group of flat weights."""
    state = at(content, STATE, "base_optimizer_state", "state") or at(content, STATE, STATE, "state")
    return list(state.values()) if isinstance(state, dict) and state else [None]


def needs(examined: Examined, *, cpus: int, available: int | None) -> Needs:
    """What a conversion takes. ``available``: bytes of memory to spare, which bound the workers; None where that is not known.

    A worker reads a rank's whole file and holds a part of it twice; then each parameter is put together, twice for a moment.
    """
    counts = [count_of(shape) for shape in examined.parameters.values()]
    optimizer = max((shard.file.size for shard in examined.tag.of(Part.OPTIMIZER)), default=0)
    model = max((shard.file.size for shard in examined.tag.of(Part.MODEL)), default=0)
    largest = max(counts, default=0) * WIDTH
    one = IMPORTED_BYTES + max(optimizer + largest, 2 * largest)
    workers = _workers(examined, one, cpus=cpus, available=available)
    main = IMPORTED_BYTES + max(optimizer, 2 * model)
    disk, result = _disk(examined, counts, optimizer)
    return Needs(
        disk=disk + sum(shard.file.size for shard in examined.tag.shards),
        result=result,
        memory=max(one, main) if workers == 1 else main + workers * one,
        workers=workers,
    )


def _workers(examined: Examined, one: int, *, cpus: int, available: int | None) -> int:
    fit = MAX_WORKERS if available is None else available * 3 // 4 // max(1, one) - 1
    return max(1, min(MAX_WORKERS, cpus, len(examined.tag.of(Part.OPTIMIZER)), fit))


def _disk(examined: Examined, counts: list[int], optimizer: int) -> tuple[int, int]:
    """(while it runs, what stays): every rank's piece of each parameter, then each parameter whole, and copies of model states."""
    facts = examined.facts
    ranks = facts.partitions or facts.data or 1
    partitioned = facts.stage is not None and facts.stage >= PARTITIONED
    pieces = len(counts) * ranks if partitioned else len(counts) + ranks
    states = len(STATES) * WIDTH * sum(counts)
    models = sum(shard.file.size for shard in examined.tag.of(Part.MODEL))
    whole = states + (len(STATES) + 1) * len(counts) * SMALL_FILE_BYTES
    # stage 3: the file of what all ranks share is a copy of the first rank's; below it, weights that no optimizer trains are added
    shared = optimizer if partitioned else 2 * models
    result = whole + models + shared + SMALL_FILE_BYTES
    return states + (len(STATES) + 1) * pieces * SMALL_FILE_BYTES + result, result


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
                return "values that differ from the saved ones"
            place += size
            read(len(content))
    return ""


@dataclass(frozen=True, kw_only=True)
class UniversalOrder:
    """``out``: the new tag's folder. ``python``: an interpreter that has DeepSpeed."""

    out: Path
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was made: its folder, parameters and bytes, what was reckoned before, and the most that one process took."""

    out: str
    parameters: int
    size: int
    needs: Needs
    peak_memory: int


def convert_checkpoint(
    order: CheckpointOrder, wish: UniversalOrder, watching: Watching, tell: Callable[[str], None]
) -> tuple[Judged, Converted | None]:
    """Make a universal checkpoint of a tag. None where the tag is not whole, which its findings tell.

    Raises UsageError for a folder that is there, ImpossiblePlan where it cannot be converted or has no room, BuildFailed where
    the converter fails or made something else. ``tell`` gets a line before it begins, and one for each of its steps.
    """
    judged = whole_tag(judge_checkpoint(order)[0])
    if judged.examined is None or judged.outcome is None:
        return judged, None
    out = wish.out.absolute()
    _check(judged.examined, out)
    needed = _told(judged.examined, out, tell)
    try:
        make_folder(out.parent)
        with hidden_folder(out.parent, WORK) as folder, _held(folder) as work:
            # the converter unpickles what it wrote itself: nobody may put another folder there meanwhile
            made = work / out.name
            with hidden_folder(folder, "judged") as copies:
                _write_copies(judged.examined, copies, watching)
                with _held(copies) as source:
                    peak = _run(judged.examined, source, made, wish.python, needed, tell)
            parameters = _checked(judged.examined, made, watching)
            total = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
            _put(made, out)
        write_text(out.parent / LATEST, out.name)
    except OSError as error:
        if is_full(error):
            raise _ran_full(out.parent) from error
        raise
    return judged, Converted(out=str(wish.out), parameters=parameters, size=total, needs=needed, peak_memory=peak)


def _check(examined: Examined, out: Path) -> None:
    name = examined.tag.folder.name
    reason = next(refusals(examined), None)
    if reason:
        raise ImpossiblePlan(f"{name} is not converted: {reason}", hint=_hint(examined))
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} already exists", hint=f"name a new folder: --universal {name}_universal")
    check_folder(out.parent, "--universal")


def _hint(examined: Examined) -> str:
    folder = str(examined.tag.folder.path)
    return f"its weights alone can be exported: {step('python -m dsdoctor checkpoint {folder} --merge OUT', folder=folder).line}"


def _told(examined: Examined, out: Path, tell: Callable[[str], None]) -> Needs:
    """What it takes, told before anything is done. Raises ImpossiblePlan where that is not there."""
    host = LocalHost()
    available, free = free_memory(host), host.free(str(out.parent))
    needed = needs(examined, cpus=host.cpus(), available=available)
    tell(
        f"the converter takes up to {amount(needed.disk)} of disk ({_free(free)} free; {amount(needed.result)} stay) "
        f"and {amount(needed.memory)} of memory ({_free(available)} free) with {needed.workers} "
        f"worker{'s' * (needed.workers > 1)}"
    )
    if free is not None and free < needed.disk:
        message = f"the conversion takes {amount(needed.disk)}, and {out.parent} has {amount(free)} left"
        raise ImpossiblePlan(message, hint="name a folder on another disk: --universal OUT")
    if available is not None and available < needed.memory:
        message = f"the conversion takes {amount(needed.memory)} of memory, and {amount(available)} are free here"
        raise ImpossiblePlan(message, hint="convert it on a machine with more memory")
    return needed


def _free(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{amount(count)}"


def _write_copies(examined: Examined, folder: Path, watching: Watching) -> None:
    """Write what was judged into a folder for the converter: of a file that others wrote or exchange it gets no byte unseen."""
    files = [shard.file for shard in examined.tag.shards]
    watching.total(sum(file.size for file in files))
    for file in files:
        try:
            with replacing(folder / file.path.name) as made:
                write_copy(file, made, watching.read)
        except BadZip as error:
            raise ImpossiblePlan(
                f"{file.path.name} is not converted: {error}", hint="dsdoctor checkpoint DIR --deep reads every byte"
            ) from error


@contextmanager
def _held(folder: Path) -> Iterator[Path]:
    """A path to a folder of this user's that stays the same one, whoever renames it or puts another in its place."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(number)
        if not is_this_user(state.st_uid) or stat.S_IMODE(state.st_mode) & 0o022:
            raise ImpossiblePlan(
                f"{folder} is shared with other users", hint="name a folder that only you can write to"
            )
        path = Path(f"/proc/{os.getpid()}/fd/{number}")
        yield path if path.is_dir() else folder
    finally:
        os.close(number)


def _run(examined: Examined, source: Path, made: Path, python: str, needed: Needs, tell: Callable[[str], None]) -> int:
    """Run the converter; the most memory that one of its processes took."""
    inject = not examined.facts.injected and (examined.facts.stage or 0) < 3
    argv = [
        python, "-m", "deepspeed.checkpoint.ds_to_universal",
        "--input_folder", str(source), "--output_folder", str(made),
        "--num_extract_workers", str(needed.workers), "--num_merge_workers", str(min(2, needed.workers)),
        *(["--inject_missing_state"] if inject else []),
    ]  # fmt: skip
    last: deque[str] = deque(maxlen=MAX_LAST_LINES)

    def hear(line: str) -> None:
        last.append(line)
        if line.startswith("*** ") and not line.startswith("*** Done"):
            tell(line.removeprefix("*** ").strip(" ."))

    host = LocalHost()
    try:
        # -m takes modules of the current folder first: one in which only root may write
        ended = host.work(argv, cwd=Path("/"), env=host.environment(), on_line=hear)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no interpreter {python}", hint="name a Python that has DeepSpeed: --python PATH"
        ) from error
    if ended.status:
        raise _failure(ended.status, last, made)
    return ended.peak_memory


def _ran_full(folder: Path) -> ImpossiblePlan:
    return ImpossiblePlan(f"the disk of {folder} ran full", hint="name a folder on another disk: --universal OUT")


def _failure(status: int, last: deque[str], made: Path) -> Exception:
    text = "\n".join(last)
    if "No module named" in text:
        return UsageError(
            "the converter is part of DeepSpeed, which is not installed here",
            hint="name a Python that has it: --python PATH",
        )
    # "unexpected pos": torch's writer found fewer bytes on the disk than it wrote
    if disk_full(text) or "PytorchStreamWriter failed" in text or "unexpected pos" in text:
        return _ran_full(Path(real_path(made.parent)).parent)
    said = next((line.strip() for line in reversed(last) if line.strip()), "nothing")
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    return BuildFailed(
        f"DeepSpeed's converter {how}: {said[:300]}", hint="nothing was left behind; the checkpoint is unchanged"
    )


def _checked(source: Examined, made: Path, watching: Watching) -> int:
    """How many parameters it has. Raises BuildFailed where what was made is not whole, or holds something else."""
    folder = look(made.parent)
    tag = folder.tag(made.name)
    if tag is None:
        raise BuildFailed("DeepSpeed's converter wrote no checkpoint", hint="nothing was left behind")
    examined = examine(folder, read_tag(tag), chosen=True)
    elements = sum(WIDTH * count_of(shape) for shape in source.parameters.values())
    watching.total(len(STATES) * elements)
    wrong = next(_wrong(source, examined, watching), None)
    if wrong:
        raise BuildFailed(f"DeepSpeed's converter wrote something else: {wrong}", hint="nothing was left behind")
    return len(examined.tag.parameters or ())


def _wrong(source: Examined, made: Examined, watching: Watching) -> Iterator[str]:
    yield from (finding.title for finding in judge_tag(made))
    folders = {parameter.name for parameter in made.tag.parameters or ()}
    yield from (f"{name} is not in it" for name in source.parameters if name not in folders)
    try:
        yield from differences(source, made, watching.read)
    except (NotMerged, Damaged, OSError) as error:
        yield str(error)


def _put(made: Path, out: Path) -> None:
    """Give it its name, all at once."""
    _synced(made)
    try:
        made.rename(out)
    except OSError as error:
        if is_full(error):
            raise
        raise UsageError(
            f"{out} could not be made: {error.strerror}", hint="name a new folder: --universal OUT"
        ) from error


def _synced(made: Path) -> None:
    """A network file system says only now that it is full."""
    for path in (path for path in made.rglob("*") if path.is_file()):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(number)
        finally:
            os.close(number)
