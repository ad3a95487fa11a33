"""How a process ended, without a cause in the log -> findings: what is known, and what would decide. Never a guess."""

import re

from dsdoctor.core.finding import Finding, Step, step
from dsdoctor.diagnosis.exits import Exit, signal_name
from dsdoctor.diagnosis.origin import Origin

FAULT_HANDLER = step("export PYTHONFAULTHANDLER=1", note="prints the Python lines of a process that a signal ends")
TEE = step("torchrun --tee 3 --log-dir logs ...", note="keeps what each rank prints")
KERNEL = step("dmesg -T | grep -i -E 'killed process|out of memory|segfault|xid'")
CGROUP = step("cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.events")
OUTLIVE = step("tmux new -s run", note="or screen, setsid, a scheduler's job")
SACCT = step("sacct -j JOB --format=JobID,State,ExitCode,Elapsed,Timelimit")
STOPPED = {
    "SIGHUP": (
        "SIGHUP is what a closed terminal or ssh session sends: start it in tmux or screen, by setsid, or as a scheduler's job, "
        "and resume from the last checkpoint. nohup alone does not do under torchrun, which takes that signal back for itself",
        (OUTLIVE, step("last -x | head", note="when sessions ended")),
    ),
    "SIGINT": (
        "SIGINT is Ctrl-C or a notebook's stop button: nothing has to be mended if that was you. If it was pressed because nothing "
        "moved, the places where the ranks stood at that moment tell what they waited for",
        (step("python -m dsdoctor.run SCRIPT.py", note="names the place if it hangs again"),),
    ),
}
"""What sends a signal from outside, most often, and what to do. Of others a scheduler's record decides."""

SIGNALS: dict[int, tuple[str, str, tuple[Step, ...]]] = {
    4: (
        "an instruction that this processor does not have",
        "compare the processor with that of the machine on which the ops were built",
        (step("lscpu"), FAULT_HANDLER),
    ),
    6: (
        "the program itself broke off: an assertion in C++, an uncaught C++ exception, or a watchdog",
        "read the lines above it that rank's own error stream has, and let Python print where it was",
        (FAULT_HANDLER, TEE),
    ),
    7: (
        "a page of memory could not be had: most often /dev/shm is full, else a file on a broken or full disk",
        "see whether /dev/shm is full while it runs, and give the container more shared memory",
        (step("df -h /dev/shm"), FAULT_HANDLER, KERNEL),
    ),
    8: ("a division by zero in native code", "let Python print where it was", (FAULT_HANDLER, TEE)),
    9: (
        "most often the host's memory ran out (the kernel's, the container's or the scheduler's limit), else somebody "
        "killed it",
        "the kernel's log decides: a line `Killed process` or `oom-kill` with this pid means that host memory ran out",
        (KERNEL, CGROUP, step("free -g")),
    ),
    11: (
        "a segmentation fault, native code read or wrote memory that is not its own",
        "let Python print where it was, then look which package's code that is",
        (FAULT_HANDLER, TEE, KERNEL),
    ),
    15: (
        "it was asked to end: by the launcher because another process had ended, by the scheduler (time limit, preemption), "
        "or by somebody",
        "see what the scheduler says of the job, and which process ended first",
        (SACCT, TEE),
    ),
    1: (
        "its terminal or ssh session was closed, most often",
        "start it where it outlives the session, and see there when that ended",
        (OUTLIVE, TEE),
    ),
    2: (
        "it was interrupted: Ctrl-C, a notebook's stop button, or a scheduler",
        "nothing has to be mended if you stopped it yourself",
        (TEE,),
    ),
}


def ended_by_signal(ended: Exit, origin: Origin, *, rule: str = "died-by-signal") -> Finding:
    """A process was ended by a signal, and the log does not say why."""
    number = ended.signal or 0
    meaning, fix, steps = SIGNALS.get(
        number, ("the log does not say why", "let Python print where it was", (FAULT_HANDLER, TEE))
    )
    doing = f" {origin.activity}" if origin.activity else ""
    verb = "was ended" if number in {1, 2, 15} else "killed" if number == 9 else "died"
    title = f"{verb}{doing} by {ended.name} (signal {number}): {meaning}; this log does not say why"
    return Finding.error(rule, title, evidence=(*_evidence(ended), *passed_over(origin)), fix=fix, steps=steps)


def broke_off_at_exit(ended: Exit, words: str) -> Finding:
    """A process whose training had ended well was ended by a signal while it exited."""
    return Finding.warning(
        "died-by-signal",
        f"the training had ended, and its process then died by {ended.name} (signal {ended.signal}) while it exited: what it had "
        "saved before is not touched by that, but whoever started it sees a failed run",
        evidence=(f"its last words: {words[:200]}", *_evidence(ended)),
        fix="end it in order: torch.distributed.destroy_process_group() as the last line of the script, after what it saves, and "
        "no thread of its own that still runs then. See that the last checkpoint is whole",
        steps=(step("python -m dsdoctor checkpoint CKPT", note="which tag is whole"), FAULT_HANDLER),
    )


def ended_without_words(ended: Exit, origin: Origin) -> Finding:
    """A process ended with an exit code, and no word of it is in the log."""
    doing = f" {origin.activity}" if origin.activity else ""
    no_error = (
        "no error is in this log but what it seems to have gone on after"
        if origin.passed_over
        else "no error of its own is in this log"
    )
    title = f"ended{doing} with {ended.name}, and {no_error}"
    fix = (
        "keep what that rank prints: torchrun --tee 3 --log-dir, or @record of torch.distributed.elastic around main, which "
        "fills error_file; a sys.exit() or os._exit() in the script leaves no traceback"
    )
    return Finding.error(
        "ended-without-words",
        title,
        evidence=(*_evidence(ended), *passed_over(origin)),
        fix=fix,
        steps=(TEE, FAULT_HANDLER),
    )


def passed_over(origin: Origin) -> tuple[str, ...]:
    """An exception that was not taken for the cause, where that is not sure."""
    failure = origin.passed_over
    if failure is None:
        return ()
    at = f", at {failure.frame}" if failure.frame else ""
    unless = "the program went on after it, unless the lines behind it are of another process"
    return (f"before it, line {failure.line}: {failure.text[:160]}{at}; {unless}",)


def interrupted(origin: Origin, line: int, text: str) -> Finding:
    """Somebody, or the scheduler, stopped the whole run."""
    found = re.search(r"(?:got signal: |Received )(\d{1,2})\b|\b(SIG(?:TERM|INT|HUP))\b", text)
    named = (signal_name(int(found[1])) if found[1] else found[2]) if found else ""
    by = (
        "Ctrl-C (SIGINT)"
        if text.startswith("KeyboardInterrupt")
        else f"the signal {named}"
        if named
        else "its scheduler"
    )
    doing = f" {origin.activity}" if origin.activity else ""
    fix, steps = STOPPED.get(
        "SIGINT" if "SIGINT" in by else named,
        (
            "a signal from outside is a scheduler's time limit or preemption, a closed terminal, or somebody's kill: the "
            "scheduler's own record decides",
            (SACCT,),
        ),
    )
    title = f"the run was stopped from outside{doing}, by {by}: it did not fail by itself"
    return Finding.error("ended-from-outside", title, evidence=(f"line {line}: {text[:300]}",), fix=fix, steps=steps)


def _evidence(ended: Exit) -> tuple[str, ...]:
    when = f" (pid {ended.pid} on {ended.host}, {ended.time})" if ended.time and ended.host else ""
    root = (f"torchrun names it as the root cause, the first process that failed{when}",) if ended.root else ()
    file = (f"its traceback is in {ended.error_file}",) if ended.error_file else ()
    return (f"line {ended.line}: {ended.text}", *root, *file)
