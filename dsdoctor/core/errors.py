"""Our own inability, and nothing else: a sick machine is a Finding. Each error carries its exit code and a next step."""


class DoctorError(Exception):
    """Something dsdoctor itself could not do.

    ``message`` states what is the matter with the two facts that clash; ``hint`` is the next command or step.
    """

    exit_code = 5

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.command = ""
        """The command that failed, where another one called it."""


class UsageError(DoctorError):
    """What was asked makes no sense: an unknown op, a malformed architecture, a source that is none."""

    exit_code = 2


class ImpossiblePlan(DoctorError):
    """What was asked makes sense, and this machine cannot do it."""

    exit_code = 3


class BuildFailed(DoctorError):
    """A compiler, a fetch or a proof failed; nothing half-made was left behind."""

    exit_code = 4


def refused_by_system(error: OSError) -> DoctorError:
    """What the operating system refused, as an error of ours."""
    place = f": {error.filename}" if error.filename else ""
    return DoctorError(f"the system refused: {error.strerror or error}{place}", hint="fix that and run again")
