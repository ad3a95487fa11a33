"""What is known of a rank and of a whole run at one moment. Data only."""

from dataclasses import dataclass, field

from dsdoctor.core.finding import Finding
from dsdoctor.core.processes import FileHolder

WATCH, RECORDERS, PROCESSES = "watch", "recorders", "processes"
"""Where an incident was seen."""
MOVED = "it called collectives or made steps"
"""The activity of a running rank that made progress between two looks."""
MAX_SAMPLE_AGE = 5.0
"""Seconds: a rank looks at itself once a second, and where it was before that says nothing of where it is."""
NOT_LOOKED = "its watch has no recent sample"
"""Why the stacks of a rank are not known whose newest sample is older, though nothing keeps Python code there from running."""


@dataclass(frozen=True, kw_only=True)
class HangOptions:
    """How a run is watched. ``after``: seconds without progress; None learns it. ``on_hang``: "report" or "stop". ``folder``: where
    the files go when there is something to tell."""

    after: float | None = None
    on_hang: str = "report"
    folder: str = "dsdoctor-hang"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a Python stack. ``text``: the source line, where it could be read."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """The stack of one thread, outermost frame first. ``main``: the thread that trains."""

    name: str
    frames: tuple[Frame, ...]
    main: bool = False


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective that a rank has called: its number in its group, name, sizes in elements, torch's words for the types of
    the elements and for its state, when it was called, in seconds since 1970 by that rank's host (0: not recorded), and the user's
    own line that called it."""

    sequence: int
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()
    state: str = ""
    called: float = 0.0
    types: tuple[str, ...] = ()
    place: tuple[Frame, ...] = ()


@dataclass(frozen=True, kw_only=True)
class History:
    """The calls of a group in little room: ``calls`` is base64 of two bytes for each number from ``first`` on, which of the
    ``kinds`` it was."""

    first: int
    kinds: tuple[Operation, ...]
    calls: str


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """A process group on one rank: how many collectives it has called in it, and the last ones. ``timeout``: torch's own,
    seconds. ``history``: the calls before the last ones."""

    name: str
    ranks: tuple[int, ...]
    sequence: int
    operations: tuple[Operation, ...] = ()
    timeout: float | None = None
    history: History | None = None


@dataclass(frozen=True, kw_only=True)
class GroupArrivals:
    """When a rank called the last collectives of a group. ``calls``: base64 of pairs of four bytes each, a number counted from
    ``sequence`` and a time in tenths of a millisecond from ``created``, which is in nanoseconds."""

    name: str
    sequence: int
    created: int
    calls: str


@dataclass(frozen=True, kw_only=True)
class SeenStack:
    """Where a rank's training thread was seen in so many looks."""

    looks: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class RankArrivals:
    """What a rank tells of itself now and then, ``number`` of them being alike on all ranks of a node."""

    number: int
    groups: tuple[GroupArrivals, ...] = ()
    stacks: tuple[SeenStack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ThreadDeath:
    """A thread that an exception has ended, and where that was raised, outermost frame first."""

    name: str
    failure: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a rank writes about itself once a second. ``joined``: its process group exists. ``parted``: it did, and was destroyed.
    ``initialized``: init_process_group has returned before. ``leaving``: the interpreter ends.
    ``signal_is_ours``: SIGUSR2 makes Python write all stacks, also while C code holds the GIL. ``failure``: an exception that ended
    the main thread. ``lock``: a file whose removal it waits for. ``handling``: an exception that the main thread handles.
    ``call``: the system call in which the main thread sleeps and the file that it is about, where that is one. ``root``: the rank
    that it names in the collective where it waits, as `src=1 in group 0`. ``rendezvous``: the address
    of the store that it wants to join. ``watcher``: the kernel's number of its thread;
    ``thread``: that of the one that trains. ``time``: by its host's monotonic clock, which no administrator and no NTP sets.
    ``all_threads``: whether ``threads`` are all that run Python, the watch's own apart.
    ``failed_in``: where ``failure`` came from. ``told``: this rank has said what another one
    raised. ``deaths``: threads that exceptions have ended.
    ``loader_workers``: the processes of the data loader that it waits for. ``workers_answer``: those surely answer SIGUSR2
    as it does itself."""

    rank: int
    world: int
    pid: int
    time: float
    joined: bool = False
    parted: bool = False
    initialized: bool = False
    leaving: bool = False
    failure: str = ""
    groups: tuple[GroupState, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    step: int | None = None
    micro_step: int | None = None
    cuda: bool = False
    lock: str = ""
    handling: str = ""
    call: tuple[str, ...] = ()
    root: str = ""
    rendezvous: str = ""
    signal_is_ours: bool = False
    all_threads: bool = False
    arrivals: RankArrivals | None = None
    failed_in: tuple[Frame, ...] = ()
    told: bool = False
    thread: int = 0
    watcher: int = 0
    deaths: tuple[ThreadDeath, ...] = ()
    loader_workers: tuple[int, ...] = ()
    workers_answer: bool = False


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A file that a rank waits for to vanish, and who of its host has it open. ``age``: seconds since it was made."""

    path: str
    holder: FileHolder
    age: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoaderWorker:
    """A worker of a rank's data loader. ``line``: where it stands, in words. ``at_lock``: it waits for a lock of its own process.
    ``blocked``: it has ended, is stopped, or waits for any lock, so that it may never answer. ``stopped``: its number
    where a signal has stopped it."""

    line: str
    at_lock: bool = False
    blocked: bool = False
    stopped: int = 0


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A rank as its node's supervisor sees it. ``state``: the kernel's letter, "" for gone. ``ended``: how it ended, in
    words; ``ended_at``: when that was seen, by its host's monotonic clock. ``silent``: seconds since its last sample.
    ``waits``: what the kernel says that its main thread sleeps in. ``call``: the system call there and the file that it is
    about, where that is one;
    ``disk``: the file system of that, in words, where the process waits for a device. ``activity``: why it is not still, "" for
    still. ``wakes``: how often its training thread came back to the user's own code while nothing moved; ``children``: processes
    that it has started and that live, its loader's workers apart; ``polls``: the loop in which it asks whether one of them still
    does. ``unserved``: nothing listens on this host where it wants to join a store. ``unread``: why its stacks could not be read,
    "" where they were. ``age``: seconds since they were. ``workers``: the first of its data loader's."""

    rank: int
    host: str
    pid: int
    sample: Sample | None
    state: str = "S"
    ended: str = ""
    ended_at: float = 0.0
    silent: float = 0.0
    waits: str = ""
    call: tuple[str, ...] = ()
    disk: str = ""
    activity: str = ""
    wakes: int = 0
    children: int = 0
    polls: str = ""
    unserved: bool = False
    lock: Lock | None = None
    unread: str = ""
    age: float = 0.0
    workers: tuple[LoaderWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A whole run in which nothing moves, or that somebody asked about. ``still``: seconds without progress.
    ``silent_hosts``: nodes that are not reached any more, with the ranks there. ``left_hosts``: nodes that answer, and whose
    watch has ended, as it does with the last rank there. ``first_ended``: ranks that ended before the others. ``source``: who saw
    it: the watch in the ranks, torch's flight recorders, or two looks at running processes, ``still`` seconds apart."""

    world: int
    still: float
    after: float
    ranks: tuple[RankView, ...]
    asked: bool = False
    silent_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    first_ended: tuple[int, ...] = ()
    when: float = 0.0
    run: str = ""
    source: str = WATCH
    nccl: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found, and the stacks of all ranks folded by equality."""

    findings: tuple[Finding, ...]
    stacks: tuple[str, ...] = ()
