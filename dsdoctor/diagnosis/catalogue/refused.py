"""Rules of whole families: a library says itself which two things exclude each other, or what it asks for. Any other rule wins."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

RAISED = (
    r"^(?:[\w.]{0,120}\.)?(?:AssertionError|ValueError|NotImplementedError|RuntimeError|TypeError|MisconfigurationException"
    r"|DeepSpeedConfigError|PipelineError|Exception): "
)
"""Exceptions that libraries raise on purpose, with a sentence."""

A_FAULT = (
    r"CUDA error|NCCL|INTERNAL ASSERT|report a bug|shape|size mismatch|sizes of tensors|dtype|out of memory|CUDA "
    r"out|Triton|driver"
    r"|checkpoint|state_dict|token|connection|timed out|symbol|undefined|compile|nvcc|PyTorch version|found version"
    r"|[Pp]ermission"
    r"|argument after|unexpected keyword|positional argument|file or directory"
)
"""Words of faults whose sentence does not name their reason."""

SETTINGS_EXCLUDE_EACH_OTHER = Rule(
    id="settings-exclude-each-other",
    stage=Stage.RUN,
    title="two settings, or a setting and this model, do not go together: {what}",
    fix="do without one of the two things that the message names; where both are needed, see in the release notes "
    "whether a newer release of the package that raised it takes them together",
    family=True,
    manual="""A library says in its own words that it does not support a combination, and stops.

Configuration, arguments of the script and the model were compared when the engine or the trainer was made. The frame
above the message tells which package compared them.

Why it matters: The run stops before the first step, on every rank.""",
    signatures=(
        Signature(
            words="supported compatible incompatible support supports",
            pattern=RAISED
            + r"(?P<what>.{2,140}?(?:(?:is|are) (?:currently |yet |still )?(?:not|un|only|in)(?: yet| currently)? "
            r"?(?:supported|compatible) "
            r"(?:with|when|for|under|together|by|in|on|if|yet)\b|do(?:es)?(?: not|n't) (?:currently |yet )?support "
            r"|[Oo]nly supports? ).{0,160})",
            unless=A_FAULT,
            tier=Tier.GENERIC,
            sample="ValueError: `dora` is not supported with deepspeed zero3.",
        ),
        Signature(
            words="exclusive combined together simultaneously cannot+both can+both same+time",
            pattern=RAISED
            + r"(?P<what>.{2,140}?(?:mutually exclusive|can(?:not|'t| not) be (?:used|combined|set|enabled"
            r"|specified|given|passed)"
            r"(?: together| at the same time| simultaneously| both)?(?: with| when| if| and|\.|$)|can(?:not|'t| "
            r"not) (?:use|set|combine|"
            r"specify|enable|pass|have) (?:both |.{2,60} (?:with|and|together|when|if|at the same time)\b)).{0,160})",
            unless=A_FAULT,
            tier=Tier.GENERIC,
            sample="ValueError: --deepspeed and --fsdp can't be used together.",
        ),
    ),
)

LIBRARY_ASKS_FOR = Rule(
    id="library-asks-for",
    stage=Stage.RUN,
    title="the run was stopped on purpose, and the message says what it asks for: {what}",
    fix="do what the message asks for; the frame above it tells which package asks, and with which setting it compared",
    steps=(step("python -m dsdoctor check"),),
    family=True,
    manual="""A library stopped the run with a sentence that says what has to be used, set or installed.

Such a sentence is written by those who know the library, and is right most often. Where it is not, the installed
version is another one than the script was written for.

Why it matters: The run stops before the first step, on every rank.""",
    signatures=(
        Signature(
            words="please must should set need ensure",
            pattern=RAISED
            + r"(?P<what>(?:.{0,160}[.,;!:(`] ?|)(?:Please|please|You (?:must|should|need to|have to)|[Dd]o not set"
            r"|[Mm]ake sure) (?:use|set|"
            r"install|upgrade|update|specify|provide|pass|remove|disable|enable|add|convert|switch|load|run|choose"
            r"|call|define|`|to )"
            r".{2,160})",
            unless=A_FAULT,
            tier=Tier.GENERIC,
            sample="ValueError: Please use scripts/pissa_init.py to initialize PiSSA in DeepSpeed ZeRO-3.",
        ),
        Signature(
            words="misconfigurationexception",
            pattern=r"^(?:[\w.]{0,120}\.)?MisconfigurationException: (?P<what>.{8,200})",
            unless=r"[Pp]lease|Do not set|(?:not|n't|un|[Oo]nly)(?: currently| yet)? ?support|You (?:must|should)|cannot be"
            r"|can't be",
            tier=Tier.GENERIC,
            title="Lightning refuses the Trainer's settings: {what}",
            sample="lightning.fabric.utilities.exceptions.MisconfigurationException: No GPU backend of this name was "
            "found",
        ),
        Signature(
            words="requires needs required",
            pattern=RAISED
            + r"(?P<what>(?:[A-Z`'][\w.`'-]{1,60} ){1,6}(?:requires|needs) (?:the |that |a |an |`)?[\w.`'<>=-]{2,60}.{0,140})",
            unless=A_FAULT + r"|positional|optimizer|gradients|grad\b",
            tier=Tier.GENERIC,
            title="the run was stopped on purpose, and the message says what it requires: {what}",
            sample="ValueError: Liger Kernel requires transformers>=4.46 to be installed",
        ),
    ),
)

RULES = (SETTINGS_EXCLUDE_EACH_OTHER, LIBRARY_ASKS_FOR)
