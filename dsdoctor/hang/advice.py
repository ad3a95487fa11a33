"""What a rank that does not come is doing -> what to do next, with the commands for its host. Judges, never looks."""

from dsdoctor.core.finding import Step, step
from dsdoctor.hang.models import RankView
from dsdoctor.hang.stacks import doing_of, waits_for_thread


def advice(view: RankView) -> tuple[str, tuple[Step, ...]]:
    """A sentence, and the commands that go with it."""
    words = doing_of(view)
    if view.sample is not None and waits_for_thread(view):
        if view.sample.deaths:
            return (
                f"on {view.host}: mend what ended that thread: what it was to give, or had locked, does not come any more",
                (),
            )
        if view.sample.all_threads and all(thread.main for thread in view.sample.threads) and "thread" in words:
            return (
                f"on {view.host}: no thread of this process is left that could end that wait: see where the one ended",
                (),
            )
    if any("waits for a lock" in line for line in view.workers):
        return f"on {view.host}: {FORKED_LOCK}", ()
    for part, (sentence, command) in NEXT.items():
        if part in words:
            return f"on {view.host}: {sentence}", tuple(made for made in (_command(command, view.pid),) if made)
    return f"on {view.host}: see in C what that line waits for", (
        step("py-spy dump --native --pid {pid}", pid=view.pid),
    )


FORKED_LOCK = (
    "see who holds that lock: one that another thread of the rank held when the worker was forked is never given back there; take "
    "no lock of the rank's in a dataset, or give the loader multiprocessing_context='spawn'"
)
CHILDREN, THREADS, FILES, LOCKS, SOCKETS, DISKS = "children", "threads", "files", "locks", "sockets", "disks"
GPU, NOTHING = "gpu", ""
NEXT = {
    "check of dsdoctor's own": ("it ends by itself; dsdoctor.run --config-check off leaves it out", NOTHING),
    "database": ("see who has its lock, or whether its server answers, and give that call a timeout", FILES),
    "data": (
        "see what its loader's workers stand in, and read that rank's part of the data by itself; DataLoader(timeout=60) turns "
        "such a wait into an error",
        CHILDREN,
    ),
    "lock of a torch extension": ("see who compiles that extension; where surely nobody does, remove the lock", FILES),
    "lock of a file": (
        "see which process has that lock, here or on another host of a shared file system; where none has, remove it",
        LOCKS,
    ),
    "service of this host": ("see whether that service answers, and give the call a timeout", SOCKETS),
    "can be read": ("see who has the other end of what it reads from, and give that wait a timeout", FILES),
    "asyncio": ("see what its coroutine awaits, and give that a timeout (asyncio.wait_for)", THREADS),
    "a signal": ("see who is to send that signal", NOTHING),
    "script has ended": (
        "have that thread end before the script does, or make it a daemon; and see why this rank ends before the others",
        THREADS,
    ),
    "compiles": ("see whether its compiler works; a wheel that holds the ops compiles nothing at run time", CHILDREN),
    "debugger": ("take the breakpoint out: the other ranks cannot wait for a person", NOTHING),
    "terminal": ("take the question out: a rank has no terminal, and the others wait", NOTHING),
    "checkpoint": ("see whether the file system of the checkpoint answers and has room", DISKS),
    "disk or a file system": ("see whether the disk, or the server of that file system, answers and has room", DISKS),
    "file system": ("see which file system does not answer, and tell who runs it", DISKS),
    "waits for a file": ("see on which file system that file lies, and whether it answers and has room", DISKS),
    "disk": ("see whether the disk answers and has room", DISKS),
    "saves": ("see whether the file system answers and has room, and that every rank makes this call", DISKS),
    "lock or another thread": (
        "see which of its threads has that lock, or what the thread waits for that it joins",
        THREADS,
    ),
    "waits for a lock": (
        "see which of its threads has that lock: one that ended with an exception may never give it back",
        THREADS,
    ),
    "another thread or process": ("see what the thread or process that it waits for stands in", THREADS),
    "process": ("see what the process that it waits for stands in, and give that wait a timeout", CHILDREN),
    "network": ("see whether the server at the other end answers, and give that call a timeout", SOCKETS),
    "device": ("see whether its GPU works on something, and which error the driver told last", GPU),
    "pipe": ("see who has the other end of that pipe, and whether it still lives", FILES),
    "sleeps": (
        "take that sleep out of the training, or have every rank do it; a loop that waits for something needs an end",
        NOTHING,
    ),
}
"""By a part of the words for what a rank does, the most special first: what to do next, and which command shows more."""


def _command(kind: str, pid: int) -> Step | None:
    """The command that shows more."""
    made = {
        CHILDREN: step("ps -o pid,stat,etime,wchan:24,args --ppid {pid}", pid=pid),
        THREADS: step("py-spy dump --pid {pid}", pid=pid),
        FILES: step("ls -l /proc/{pid}/fd", pid=pid),
        LOCKS: step("lslocks"),
        SOCKETS: step("ls -l /proc/{pid}/fd /proc/{pid}/net/tcp", pid=pid),
        DISKS: step("df -h"),
        GPU: step("nvidia-smi"),
    }
    return made.get(kind)
