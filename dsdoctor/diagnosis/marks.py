"""Patterns of lines that show how a log went: it failed, it ended well, a compile began. They name no cause."""

import enum
from dataclasses import dataclass


class Event(enum.Enum):
    """What a mark shows."""

    FAILED = "failed"
    ENDED_WELL = "ended well"
    EXITED_ZERO = "exited with zero"
    ASKED_FOR_STATUS = "asked for status"
    NCCL_WARNED = "nccl warned"
    LAST_ERROR = "last error"
    COMPLAINED = "complained"
    TRACEBACK = "traceback"
    EXCEPTION = "exception"
    WAITING = "waiting"
    COMPILING = "compiling"
    LOADED = "loaded"
    CANCELLED = "cancelled"
    NO_GPU = "no gpu"
    WINDOWS = "windows"
    COMPILER_ERROR = "compiler error"
    GPU_FAULT = "gpu fault"
    CHAINED = "chained"
    IGNORED = "ignored"
    USAGE = "usage"
    ERROR_FILE = "error file"
    CRASHED = "crashed"
    EXITED = "exited"
    NO_NUMBER = "no number"
    MISSING = "missing"
    WORLD = "world"
    BUILDING = "building"
    STOPPED = "stopped"
    WATCHDOG = "watchdog"
    RECOVERED = "recovered"
    WORK = "work"
    SUITE_BEGAN = "suite began"
    SUITE_CAPTURED = "suite captured"
    SUITE_PASSED = "suite passed"
    SUITE_FAILED = "suite failed"

    __hash__ = object.__hash__  # why: an event is looked up for each mark of each line, and this one is in C


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A pattern of lines that show an event; ``words`` and ``pattern`` as in Signature.

    ``first_hand``: it shows nothing where a warning or a sentence has it. ``after``: must be found in the lines just above.
    """

    event: Event
    words: str
    pattern: str
    first_hand: bool = False
    after: str = ""


MARKS = (
    Mark(event=Event.TRACEBACK, words="traceback", pattern=r"Traceback \(most recent call last\)"),
    # Ray shows the places of an actor's own exception without a head
    Mark(event=Event.TRACEBACK, words="creation+ray", pattern=r"error raised in its creation task, ray::"),
    Mark(
        event=Event.COMPLAINED,
        first_hand=True,
        words="error",
        pattern=r"^(?:error|ERROR(?!: pip's dependency))[: ]|(?<!collect2): error:",
    ),
    Mark(
        event=Event.FAILED,
        first_hand=True,
        words="fatal",
        pattern=r"fatal error\b(?! LNK1181: .{0,60}(?:aio|cufile)\.lib)",
    ),
    Mark(
        event=Event.FAILED,
        words="exits exitcode main+received death+signal exit+code exit+status exited+code exited+status complete+code zero+code",
        pattern=r"exits with return code = -?[1-9]|Main process received SIG|Received \d{1,2} death signal"
        r"|exitcode\s*: -?[1-9]|non-zero code: [1-9]"
        r"|(?:[Ee]xit(?:ed)?|did not complete).{0,60}?(?:code|status):? {0,8}-?[1-9]\d*\b",
    ),
    Mark(
        event=Event.FAILED,
        first_hand=True,
        words="failed+building failed+build subprocess metadata+generation ninja+stopped wheels+build",
        pattern=r"Failed (?:building|to build)|subprocess-exited-with-error|metadata-generation-failed|ninja: "
        r"build stopped|Could not build wheels",
    ),
    Mark(
        event=Event.FAILED,
        first_hand=True,
        words="childfailederror aborted segmentation dumped killed",
        pattern=r"ChildFailedError|Aborted\b|Segmentation fault|core dumped|^Killed\b|\d Killed\s",
    ),
    Mark(event=Event.FAILED, first_hand=True, words="nvcc+fatal ptxas+fatal", pattern=r"(?:nvcc|ptxas) fatal"),
    Mark(
        event=Event.FAILED,
        words="make fatal mpirun",
        pattern=r"^(?:fatal(?!: not a git)[: ]|make(?:\[\d\])?: \*\*\*|mpirun (?:has|was))",
    ),
    Mark(
        event=Event.EXCEPTION,
        words="runtimeerror valueerror typeerror keyerror attributeerror importerror modulenotfounderror assertionerror "
        "indexerror oserror connectionerror floatingpointerror filenotfounderror permissionerror nameerror "
        "outofmemoryerror exception distbackenderror "
        "diststoreerror distnetworkerror calledprocesserror validationerror",
        pattern=r"^(?:[\w.]{1,80}\.)?[A-Z]\w{1,60}(?:Error|Exception): ",
    ),
    Mark(
        event=Event.EXCEPTION,
        words="zeroruntimeexception signalexception "
        "safetensorerror unpicklingerror eoferror notimplementederror timeouterror unboundlocalerror zerodivisionerror "
        "lookuperror unicodedecodeerror jsondecodeerror hjsondecodeerror acceleratorerror httperror memoryerror "
        "isadirectoryerror notadirectoryerror fileexistserror brokenpipeerror connectionreseterror overflowerror "
        "recursionerror syntaxerror systemerror childprocesserror blockingioerror hfvalidationerror "
        "gatedrepoerror localentrynotfounderror repositorynotfounderror misconfigurationexception checkpointerror pipelineerror "
        "deepspeedconfigerror actordiederror actorunavailableerror distributedoperationexception ptxaserror runtimeexception "
        "internaltorchdynamoerror torchruntimeerror datasetgenerationerror arrowinvalid processgrouperror "
        "rendezvousconnectionerror elasticityconfigerror elasticityincompatibleworldsize assertionerror",
        pattern=r"^(?:[\w.]{1,80}\.)?[A-Z]\w{1,60}(?:Error|Exception|WorldSize|ArrowInvalid): ",
    ),
    Mark(
        event=Event.EXCEPTION,
        words="validation+error validation+errors",
        pattern=r"^\d{1,3} validation errors? for \w{1,80}",
    ),
    Mark(event=Event.IGNORED, words="exception+ignored", pattern=r"^Exception ignored "),
    Mark(
        event=Event.USAGE,
        first_hand=True,
        words="error+py open+file",
        pattern=r"^\S{1,80}\.py: error: |can't open file '",
    ),
    Mark(event=Event.ERROR_FILE, words="error_file", pattern=r"^error_file: /\S{1,300}"),
    Mark(
        event=Event.CHAINED,
        words="handling+exception direct+exception",
        pattern=r"^During handling of the above exception|^The above exception was the direct cause",
    ),
    Mark(
        event=Event.CRASHED,
        first_hand=True,
        words="terminate+called what assertion+failed fatal+python free malloc realloc corruption smashing check+failed",
        pattern=r"^what\(\): |terminate called (?:after|without)|Assertion [`'\"].{1,400}failed|Assertion failed: "
        r"|^Fatal Python error: |^(?:free|malloc|realloc|corrupted)\(?\)?: |double free or corruption"
        r"|stack smashing detected|\.(?:cc|cpp|cu|h):\d{1,6}\S{0,4} {0,3}Check failed: ",
    ),
    Mark(event=Event.CRASHED, words="xid", pattern=r"NVRM: Xid"),
    Mark(
        event=Event.CRASHED,
        words="memory+fault hsa_status_error_exception hsa_status_error_out_of_resources "
        "hsa_status_error_memory_aperture_violation hsa_status_error_illegal_instruction hsa_status_error_memory_fault",
        pattern=r"^Memory access fault by GPU |\bHSA_STATUS_ERROR_\w{1,60}",
    ),
    Mark(
        event=Event.EXITED,
        words="exitcode exits+code srun+error signals+died caught+signal signal+terminated signal+exited exit+code "
        "exited+code exit+status "
        "exited+status exit_code non+code segmentation killed aborted bus+error "
        "illegal+instruction getötet arrêté tué matado terminado 已杀死 已砍掉 強制終了 убито ucciso morto 죽었음 "
        "speicherzugriffsfehler segmento 段错误 段錯誤 セグメンテーション違反 сегментирования",
        pattern=r"exitcode|exits with return code|srun: error|died with <Signals|signal|[Ee]xit|non-zero|Segmentation fault"
        r"|Killed|Aborted|Bus error|Illegal instruction|Getötet|Processus arrêté|Tué|Matado|Terminado|已杀死|已砍掉|強制終了"
        r"|Убито|Ucciso|Morto|죽었음|Speicherzugriffsfehler|segmento|segmentation|段错误|段錯誤|セグメンテーション違反|сегментирования",
    ),
    Mark(event=Event.NO_NUMBER, words="nan", pattern=r"(?i)nan"),
    Mark(
        event=Event.MISSING,
        words="clients+joined workers+joined wait+timeout monitoredbarrier worker_count num_workers_joined faulty "
        "no_other_failures",
        pattern=r"\b\d{1,6}/\d{1,6} (?:clients|workers) joined|wait timeout after \d{1,12}ms, keys: "
        r"|failed to pass monitoredBarrier|worker_count=\d|barrier on rank.{0,160}num_workers_joined=\d"
        r"|for faulty rank|<NO_OTHER_FAILURES>",
    ),
    Mark(
        event=Event.STOPPED,
        words="main+received signalexception cancelled death+signal",
        pattern=r"Main process received SIG(?:TERM|INT|HUP)|SignalException: |CANCELLED AT|Received \d{1,2} death signal",
    ),
    Mark(
        event=Event.RECOVERED,
        words="retrying will+retry again+trying attempt+ok attempts+succeeded attempts+ok attempt+succeeded retry+succeeded "
        "falling+back fell+back skipped skipping going+without continuing+without goes+without continuing+anyway "
        "reconnecting reconnected using+default using+instead disabled+is disabling",
        pattern=r"\b[Rr]etrying\b|\b[Ww]ill retry\b|\b[Tt]rying again\b|\b[Ss]ucceeded (?:after|on|at|in)\b"
        r"|\battempts?\b.{0,20}(?:: ok|succeeded)|\bok after \d|\b[Rr]etry succeeded|\b[Ff](?:alling|ell) back\b|\bis skipped"
        r"|\b[Ss]kipping (?!incompatible)|\b[Ss]kipped (?!step)"
        r"|\b(?:[Gg]o(?:ing|es)|[Cc]ontinuing) (?:on )?without\b|\b[Cc]ontinuing anyway"
        r"|\b[Rr]econnect(?:ing|ed)\b|\b[Uu]sing .{0,40}(?:\binstead\b|\bdefault\b)|\bis disabled|\b[Dd]isabling\b",
    ),
    Mark(
        event=Event.WATCHDOG,
        words="watchdog nccl+operations",
        pattern=r"[Ww]atchdog (?:caught|hang|got stuck|thread)|Some NCCL operations have failed",
    ),
    Mark(
        event=Event.WORK,
        words="enqueued+work watchdog+collective lagging+ranks join+collective missing+ranks",
        pattern=r"[Ll]ast enqueued (?:NCCL )?work: -?\d|Watchdog caught collective operation timeout: WorkNCCL\(SeqNum="
        r"|ranks \[\d[\d, ]{0,200}\] are the lagging ranks|finished collective #\d{1,12}, but didn't join"
        r"|[Mm]issing [Rr]anks?:? ?[\[{]\d",
    ),
    Mark(event=Event.WORLD, words="dist_world_size", pattern=r"dist_world_size=\d{1,6}(?!\d)"),
    Mark(
        event=Event.BUILDING,
        words="building installing ninja nvcc egg_info setup wheel metadata dtorch_extension_name",
        pattern=r"[Bb]uilding (?:extension|wheel|editable)|ninja: |-DTORCH_EXTENSION_NAME|setup\.py|egg_info|bdist_wheel"
        r"|(?:[Pp]reparing|generate) metadata|pip install|Installing build dependencies|nvcc ",
    ),
    Mark(
        event=Event.ENDED_WELL,
        words="successfully finished",
        pattern=r"Successfully (?:installed|built) .{0,400}\bdeepspeed\b|exits successfully|Finished processing "
        r"dependencies for deepspeed|\bSuccessfully finished\.",
    ),
    Mark(
        event=Event.ENDED_WELL,
        words="train_runtime training+completed training+finished training+complete training+done fit+stopped succeeded "
        "worker+finished",
        pattern=r"'train_runtime':|\btrain_runtime {1,40}= |[Tt]raining (?:is )?(?:completed|finished|complete|done)\b"
        r"|[Ff]inished [Tt]raining\b|Trainer\.fit` stopped: `max_|worker group successfully finished"
        r"|WorkerState\.SUCCEEDED|^(?:INFO {0,3}[:-] {0,3})?Job '[\w.-]{1,80}' succeeded",
    ),
    # the first and last words of pytest, and the last ones of unittest; see suites
    Mark(
        event=Event.SUITE_BEGAN,
        words="session+starts collected+items collected+item",
        pattern=r"^=+ test session starts =+$|^collected \d{1,6} items?\b",
    ),
    Mark(
        event=Event.SUITE_CAPTURED,
        words="captured+call captured+setup captured+teardown",
        pattern=r"^-+ Captured (?:stdout|stderr|log) (?:call|setup|teardown) -+$",
    ),
    Mark(
        event=Event.SUITE_PASSED,
        words="passed skipped",
        pattern=r"^=* ?(?:\d{1,6} (?:passed|skipped|deselected|xfailed|xpassed|warnings?|rerun|subtests passed)(?:, )?){1,8}"
        r" in \d{1,6}\.\d\ds(?: \([\d:, day]{1,20}\))? ?=*$",
    ),
    Mark(
        event=Event.SUITE_FAILED,
        words="failed+in error+in errors+in",
        pattern=r"^=* ?(?:\d{1,6} (?:failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?|rerun)(?:, )?){1,8}"
        r" in \d{1,6}\.\d\ds(?: \([\d:, day]{1,20}\))? ?=*$",
    ),
    Mark(
        event=Event.SUITE_FAILED,
        words="failures errors",
        pattern=r"^FAILED \((?:failures|errors)=\d{1,6}",
        after=r"^Ran \d{1,6} tests? in \d",
    ),
    Mark(
        event=Event.EXITED_ZERO,
        words="exited+0 exit+0 exitcode+0 exit_code+0 completed+0 finished+0 terminated+0 rc+0 status+0 returned+0 state+completed",
        pattern=r"\bJob {1,3}(?:Id: )?\d{1,12}\b.{0,80}\bCOMPLETED\b|\bState\b[=: (]{1,4}COMPLETED\b|ExitCode=0:0"
        r"|^(?:\[[^\]]{0,80}\] ?)?(?:[\w./+-]{1,60} ){1,4}(?:exited|finished|completed|terminated|returned|ended)"
        r"(?: with)?(?: (?:exit|return))?(?: (?:code|status))?[ :=]{1,3}0\.?$"
        r"|^[Ee]xit (?:code|status) of \S{1,60}[ :=]{1,3}0\.?$"
        r"|^(?:[Ee]xit(?:ed)?|EXIT|[Rr]eturn|[Jj]ob exit)?(?: with)?[ _-]?(?:[Cc]ode|CODE|[Ss]tatus|STATUS|rc|RC)[ :=]{1,3}0\.?$",
    ),
    Mark(event=Event.NCCL_WARNED, words="nccl+warn", pattern=r"\[\d{1,3}\] (?:\S{1,80} )?NCCL WARN \S"),
    Mark(event=Event.LAST_ERROR, words="last+error", pattern=r"^Last error:$"),
    Mark(event=Event.ASKED_FOR_STATUS, words="echo", pattern=r"^[$#%] echo \$\?$|^\+ echo 0$"),
    Mark(
        event=Event.WAITING,
        words="extensions+root patching+ldflags extension+directory waited+lock",
        pattern=r"as PyTorch extensions root|Waited on lock file|Detected CUDA files, patching ldflags"
        r"|Creating extension directory",
    ),
    Mark(
        event=Event.COMPILING,
        words="dtorch_extension_name building failed+o failed+code",
        pattern=r"-DTORCH_EXTENSION_NAME|[Bb]uilding (?:extension|wheel for|')|^FAILED: \S",
    ),
    Mark(event=Event.LOADED, words="time+load", pattern=r"Time to load \w+ op"),
    Mark(event=Event.CANCELLED, words="cancelled keyboardinterrupt", pattern=r"CANCELLED AT|^KeyboardInterrupt"),
    Mark(
        event=Event.NO_GPU,
        words="torch+did cuda+runtime",
        pattern=r"Torch did not find cuda available|No CUDA runtime is found",
    ),
    Mark(
        event=Event.WINDOWS,
        words="appdata users winerror pyd lnk1181 lnk1104 lnk1120 c1083",
        pattern=r"\b[A-Z]:\\|WinError|\.pyd\b|LNK1\d\d\d|C1083",
    ),
    Mark(
        event=Event.COMPILER_ERROR,
        first_hand=True,
        words="error fatal severe",
        pattern=r"^\S{1,300}(?::\d+|\(\d+\))(?::\d+)?: (?:fatal |catastrophic )?error(?: #?[A-Z]{0,4}\d{2,5})?: "
        r"|^\"[^\"]{1,300}\", line \d+: (?:catastrophic |internal |fatal )?error\b|^(?:nvcc|ptxas|nvlink) (?:fatal|error) {1,4}: "
        r"|^(?:\S{0,200}/)?(?:clang(?:\+\+)?|ld\.lld|cc1plus|g\+\+|gcc|c\+\+|ic(?:p?c|p?x)|nvc(?:\+\+)?|hipcc): "
        r"(?:fatal |severe )?error(?: #\d{1,6})?: (?!linker command|no input)"
        r"|^(?:LINK|cl) : (?:fatal |Command line )?error [A-Z]{1,4}\d{2,5}: ",
    ),
    Mark(
        event=Event.GPU_FAULT,
        first_hand=True,
        words="cuda+memory cuda+error outofmemoryerror hip+memory hip+error",
        pattern=r"\b(?:CUDA|HIP) out of memory|\bOutOfMemoryError: |\b(?:CUDA|HIP) error: (?:out of memory|an illegal memory access"
        r"|device-side assert|unspecified launch|misaligned address|uncorrectable ECC|an illegal instruction|unknown error)",
    ),
)
