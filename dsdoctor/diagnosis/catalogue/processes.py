"""Rules of processes beside the ranks: workers that are forked or spawned, actors of Ray, loggers such as wandb."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

START_METHOD_WRONG = Rule(
    id="process-start-method",
    stage=Stage.RUN,
    title="a process was started in a way that does not go together with what its parent has done already",
    fix="keep what is sent to worker processes small and plain (functions at the top of a module), put the script's own "
    "start under if __name__ == '__main__':, or start workers by fork",
    manual="""Python starts worker processes by fork (a copy of the parent) or by spawn (a new Python that imports
the script).

A spawned process imports the main script, which needs `if __name__ == "__main__":`, and is sent its work by pickle,
which refuses lambdas, local functions, open files and process groups.

Why it matters: The workers do not start, or end at once.""",
    signatures=(
        Signature(
            words="finished+bootstrapping",
            pattern=r"process has finished its bootstrapping phase",
            title="the main script starts processes when it is imported: on Windows and with spawn each of them "
            "imports it again",
            fix="put what the script does under if __name__ == '__main__': (a DataLoader's workers need it as well), "
            "or set num_workers to 0",
            sample="current process has finished its bootstrapping phase.",
        ),
        Signature(
            words="pickle+local get+local",
            pattern=r"(?:AttributeError|PicklingError): Can't (?:pickle|get) local object "
            r"(?:'|<function )(?P<what>(?!\w{0,40}(?:DeepSpeed|Zero))[\w.<>]{1,120})",
            tier=Tier.GENERIC,
            title="{what}, a function within a function, is to be pickled for another process, and cannot be",
            fix="set num_workers=0 (dataloader_num_workers, preprocessing_num_workers), or start workers by fork; on "
            "Windows and macOS, where they are spawned, define the function (no lambda) at the top of its module (a newer "
            "release of its package often does)",
            steps=(
                step("python -m pip install -U trl transformers"),
                instead("python -m dsdoctor explain process-start-method"),
            ),
            sample="AttributeError: Can't get local object "
            "'AutoModelForCausalLMWithValueHead.post_init.<locals>.set_device_hook'",
        ),
        Signature(
            words="pickle+cannot pickle+can picklingerror",
            pattern=r"(?:TypeError: (?:cannot|can't) pickle|PicklingError: Can't pickle) (?P<what>[^:]{1,120})",
            unless=r"local object|'torch\._C\._distributed|'(?:torch\.(?:\w{1,20}\.)?)?(?:Stream|\w{0,20}Event)'",
            tier=Tier.GENERIC,
            title="{what} cannot be pickled, so it can be neither sent to another process nor saved",
            fix="keep it out of what is sent or saved: of the data set, the collate function (no lambda, no local "
            "function), the arguments of a spawned process, the client_state of save_checkpoint and the "
            "hyperparameters of Lightning",
            sample="TypeError: cannot pickle '_io.TextIOWrapper' object",
        ),
    ),
)

LOGGER_REFUSED = Rule(
    id="logger-refused",
    stage=Stage.RUN,
    title="{name|the experiment logger} cannot be used: it is not logged in, or its service cannot be reached",
    fix="log in on the machine where the ranks run (WANDB_API_KEY), or switch it off: report_to none, "
    "WANDB_MODE=offline",
    steps=(step("export WANDB_MODE=offline"), instead("wandb login")),
    manual="""The script reports to a service such as Weights & Biases, and that failed.

transformers reports to every such package that is installed, unless report_to says otherwise. Ranks that a launcher
started have no terminal to ask for a key.

Why it matters: One rank ends for the sake of a plot, and the others wait for it.""",
    signatures=(
        Signature(
            words="wandb+usageerror wandb+commerror wandb+authenticationerror wandb+api_key wandb+errors",
            pattern=r"^(?P<name>wandb)\.(?:errors\.)?(?:[\w.]{1,40}\.)?(?:UsageError|CommError|AuthenticationError|Err"
            r"or): |"
            r"(?P<name2>wandb): ERROR (?:api_key not configured|Error while calling W&B API)",
            sample="wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        ),
        Signature(
            words="api+key+characters api+wandb+error",
            pattern=r"ValueError: API key must (?:be|have) (?:at least )?40\+? characters|(?:HTTPError|ConnectionError"
            r"|Con"
            r"nectTimeout|SSLError): .{0,160}api\.wandb\.ai",
            title="wandb does not take the key that it was given, or its service (api.wandb.ai) cannot be reached",
            sample="ValueError: API key must be 40 characters long, yours was 2",
        ),
        Signature(
            words="requires+installed+tensorboardcallback requires+installed+wandbcallback requires+callback "
            "requires+tensorboard",
            pattern=r"RuntimeError: (?P<name>(?:TensorBoard|Wandb|CometML?|MLflow|ClearML|SwanLab|Neptune|DVCLive|Azur"
            r"eML"
            r"|CodeCarbon|Trackio)\w{0,20}?)(?:Callback)? requires .{1,80} to be installed",
            title="report_to names {name}, and its package is not installed",
            fix="install it (tensorboard, wandb, ...), or give --report_to none",
            steps=(step("python -m pip install tensorboard"),),
            sample="RuntimeError: TensorBoardCallback requires tensorboard to be installed. Either update your "
            "PyTorch version "
            "to 1.9 or install tensorboardX.",
        ),
    ),
)

USER_WITHOUT_NAME = Rule(
    id="user-without-name",
    stage=Stage.RUN,
    title="this user has a number and no name here (uid {uid|of the container} is not in /etc/passwd)",
    fix="give it a name: a line in the container's /etc/passwd, or the variables USER and LOGNAME; torch asks for it "
    "for the name of "
    "a cache folder, which TORCHINDUCTOR_CACHE_DIR sets as well",
    steps=(step("export USER=user LOGNAME=user HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor"),),
    manual="""The process runs under a user's number that the container does not know, as Kubernetes and OpenShift do.

Python's getpass.getuser() and pwd then fail, and torch and Triton call them.

Why it matters: Importing or compiling stops, although nothing is wrong with it.""",
    signatures=(
        Signature(
            words="getpwuid username+environment",
            pattern=r"KeyError: 'getpwuid\(\): uid not found: (?P<uid>\d{1,12})'|OSError: No username set in the "
            r"environment",
            sample="KeyError: 'getpwuid(): uid not found: 1000950000'",
        ),
    ),
)

RULES = (START_METHOD_WRONG, LOGGER_REFUSED, USER_WITHOUT_NAME)
