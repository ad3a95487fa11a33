"""Each command's own exit statuses, as the end of its help tells them. They are those of the README."""

from collections.abc import Mapping

from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError

UNABLE, FAILED = ImpossiblePlan.exit_code, BuildFailed.exit_code
SLOW = UNDECIDED = 6
ALWAYS = {
    0: "done",
    UsageError.exit_code: "invalid usage",
    UNABLE: "impossible here, for example because the disk is full",
    DoctorError.exit_code: "a bug in dsdoctor",
}
SIGNAL = "128+N ended by signal N"
ERROR = "an error was found"
PAGE = "the extra that draws pages is missing, or the disk is full"
BUILD = {
    UNABLE: "impossible on this machine, or its disk is full",
    FAILED: "a build, a download or a verification failed",
}
CACHE = "the cache cannot be used, or the disk is full"

OWN: Mapping[str, Mapping[int, str]] = {
    "machine look": {},
    "check": {1: ERROR, UNABLE: f"no such source of ops, {CACHE}", FAILED: "a source could not be downloaded"},
    "explain": {},
    "diagnose": {0: "the log shows an end or progress", 1: "the log shows a failure", UNDECIDED: "undecided"},
    "env": {
        UNABLE: "no toolkit or compiler fits, or the disk is full",
        FAILED: "a list of packages could not be read",
    },
    "build-wheel": BUILD,
    "prebuild": {**BUILD, FAILED: "a build, a download, a verification or the installation failed"},
    "install": {
        1: "an op does not load, or a node's verify found an error",
        UNABLE: "impossible on this machine, its disk is full, or ssh is missing",
        FAILED: "a build, a download, a verification or an installation failed, or a node was not reached",
    },
    "toolkit": {
        UNABLE: "none fits and none can be assembled, or the disk is full",
        FAILED: "a part could not be downloaded",
    },
    "wheel verify": {1: ERROR, FAILED: "a listed wheel could not be downloaded"},
    "wheel pick": {1: "none fits", FAILED: "an index could not be read"},
    "wheel index": {},
    "cache ls": {UNABLE: CACHE},
    "cache prune": {UNABLE: CACHE},
    "cache verify": {1: "damaged entries were removed", UNABLE: CACHE},
    "machine record": {},
    "machine compare": {0: "no differences", 1: "differences"},
    "config": {
        1: ERROR,
        UNABLE: "no DeepSpeed to ask, or the disk is full",
        FAILED: "the DeepSpeed of --source could not be downloaded",
    },
    "checkpoint": {
        1: "an error was found, or the planned run can't load it",
        UNABLE: "can't be merged, converted or compared with a model, or the disk is full",
        FAILED: "the converter failed",
    },
    "comm": {
        0: "all is well",
        1: "something is broken",
        UNABLE: PAGE,
        SLOW: "works, but something is slow, late or differs between ranks",
    },
    "memory": {
        0: "it fits",
        1: "it does not fit",
        UNABLE: "DeepSpeed, torch, transformers or the extra that draws pages is missing, or the disk is full",
    },
    "hang": {1: ERROR, UNABLE: PAGE},
    "trace show": {1: "with --headroom: a module does not fit"},
    "trace compare": {0: "no divergence", 1: "a divergence, or a nan or inf on one side only"},
    "trace plot": {UNABLE: PAGE},
}
"""What else a command can end with than ALWAYS, or what a number means for it."""

GENERAL = {
    **ALWAYS,
    1: "an error was found, or a difference",
    UNABLE: BUILD[UNABLE],
    FAILED: "a build, a download, a verification or an installation failed",
    SLOW: "slow (comm), undecided (diagnose)",
}
OF_GROUP = "The help of each of these commands has its exit statuses."


def statuses_of(command: str) -> dict[int, str]:
    """Each number that a command can end with but by a signal, and what it means.

    >>> statuses_of("explain")
    {0: 'done', 2: 'invalid usage', 3: 'impossible here, for example because the disk is full', 5: 'a bug in dsdoctor'}
    """
    return dict(sorted({**ALWAYS, **OWN[command]}.items()))


def statuses_line(statuses: Mapping[int, str]) -> str:
    """The last line of a help."""
    told = [f"{number} {meaning}" for number, meaning in sorted(statuses.items())]
    return f"Exit status: {'; '.join([*told, SIGNAL])}."
