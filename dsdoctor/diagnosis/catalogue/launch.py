"""Rules of launching: the launcher's programs, MPI, and the variables that a launcher sets."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

LAUNCHER_BACKEND_MISSING = Rule(
    id="launcher-backend-missing",
    stage=Stage.LAUNCH,
    title="the launcher needs {launcher}, and it is not installed here",
    fix="install it on the node that launches, or launch without it (torchrun on each node, or one node only)",
    steps=(step("sudo apt install {launcher_package}"), step("python -m dsdoctor check")),
    manual="""The launcher starts the nodes through a program that is not installed on the node where you launch.

deepspeed starts several nodes (and autotuning even one) through pdsh by default, or through mpirun, srun or
mpiexec. Without a hostfile it trains on one node and needs none of them.

Why it matters: Nothing is started on any node.""",
    signatures=(
        Signature(
            words="launcher+installed pdsh",
            pattern=r"launcher '(?P<launcher>[\w-]+)' not installed|(?P<launcher2>pdsh) is not installed, unable "
            r"to proceed",
            sample="RuntimeError: launcher 'pdsh' not installed.",
        ),
        Signature(
            words="pdsh mpirun mpiexec srun ompi_info mpirun_rsh mpichversion",
            pattern=r"(?:^|[\s:'\"])(?P<launcher>pdsh|mpirun|mpiexec|srun|ompi_info|mpirun_rsh"
            r"|mpichversion)['\"’]?: (?:(?:command )?not found|No such file or directory$)"
            r"|command not found: (?P<launcher3>pdsh|mpirun|mpiexec|srun)$"
            r"|(?:No such file or directory|cannot find the file specified): '(?P<launcher2>pdsh|mpirun|mpiexec|srun"
            r"|ompi_info|mpichversion)'",
            sample="/bin/sh: 1: pdsh: not found",
        ),
        Signature(
            words="insecure",
            pattern=r"(?P<launcher>pdsh)@\S{1,160}: module path \"[^\"]{1,80}\" insecure",
            title="{launcher} refuses its own module folder: it is not owned by root",
            fix="give the folder to root, or name the ssh module in PDSH_RCMD_TYPE",
            steps=(step("export PDSH_RCMD_TYPE=ssh"),),
            sample='pdsh@node0: module path "/usr/lib/x86_64-linux-gnu/pdsh" insecure.',
        ),
    ),
)

MPI_ROOT_REFUSED = Rule(
    id="mpi-root-refused",
    stage=Stage.LAUNCH,
    title="{program|mpirun} refuses to run as root",
    fix="run as another user, or allow root in a container that is yours alone",
    steps=(
        step("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        instead("mpirun --allow-run-as-root ..."),
    ),
    manual="""Open MPI does not start as root unless it is told to.

In a container the user is often root. deepspeed passes options to mpirun with --launcher_args.

Why it matters: Mpirun stops, and no rank is started.""",
    signatures=(
        Signature(
            words="root+detected",
            pattern=r"(?P<program>mpirun|mpiexec|orterun|prterun|prte) has detected an attempt to run as root",
            sample="mpirun has detected an attempt to run as root.",
        ),
    ),
)

NUMACTL_MISSING = Rule(
    id="numactl-missing",
    stage=Stage.LAUNCH,
    title="--bind_cores_to_rank needs numactl, and it is not installed",
    fix="install numactl on every node, or drop --bind_cores_to_rank",
    steps=(step("sudo apt install numactl"),),
    manual="""deepspeed --bind_cores_to_rank starts each rank through the program numactl, and it is not installed.

Why it matters: No rank is started on that node.""",
    signatures=(
        Signature(
            words="numactl",
            pattern=r"please install the numactl package|No such file or directory: '?\"?numactl|numactl: "
            r"(?:command )?not found",
            sample="FileNotFoundError: [Errno 2] No such file or directory: 'numactl'",
        ),
    ),
)

NO_LAUNCHER_ENV = Rule(
    id="no-launcher-env",
    stage=Stage.RUN,
    title="the script was started without a launcher: {variable|RANK} is not set",
    fix="start it with a launcher, or set the variables for a single process",
    steps=(
        step("deepspeed --num_gpus 1 SCRIPT.py"),
        instead("torchrun --nproc_per_node 1 SCRIPT.py"),
        instead("export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"),
    ),
    manual="""The script was started without a launcher, so a variable that every rank needs is not set.

deepspeed and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where one is unset (plain
python, a notebook, srun), DeepSpeed asks MPI instead.

Why it matters: DeepSpeed then fails on mpi4py. Installing mpi4py is seldom what is needed.""",
    signatures=(
        Signature(
            words="mpi4py",
            pattern=r"No module named '?mpi4py",
            title="RANK and WORLD_SIZE are unset, so DeepSpeed asked MPI, and mpi4py is not installed",
            sample="ModuleNotFoundError: No module named 'mpi4py'",
        ),
        Signature(
            words="hostname+command",
            pattern=r"CalledProcessError: Command '?\[?['\"]?hostname -I\b.{0,40}returned non-zero exit status",
            title="RANK is not set, as without deepspeed or torchrun, so DeepSpeed asked MPI and wanted this machine's address "
            "from `hostname -I`, and that failed here: the hostname of inetutils, of busybox and of macOS has no -I",
            fix="start it with a launcher, which names the address; or set the variables of a single process; or install a "
            "hostname that knows -I",
            sample="subprocess.CalledProcessError: Command '['hostname -I']' returned non-zero exit status 64.",
        ),
        Signature(
            words="local_rank+environment+requires",
            pattern=r"AssertionError: DeepSpeed requires the (?P<variable>LOCAL_RANK) environment variable",
            sample="AssertionError: DeepSpeed requires the LOCAL_RANK environment variable, it is set by the deepspeed "
            "launcher, deepspeed.init_distributed, or the torch's launcher.",
        ),
        Signature(
            words="environment+variable+expected",
            pattern=r"environment variable (?P<variable>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT) "
            r"expected, but not set",
            sample="ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
            "variable RANK expected, but not set",
        ),
        Signature(
            words="keyerror",
            pattern=r"KeyError: ['\"](?P<variable>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT"
            r"|OMPI_COMM_WORLD_LOCAL_RANK)['\"]",
            sample="KeyError: 'LOCAL_RANK'",
        ),
        Signature(
            words="libmpi load+mpi slurm+ompi",
            pattern=r"(?P<variable>libmpi\.so[.\d]*): cannot open shared object|[Cc]annot load MPI library|OMPI "
            r"was not built with SLURM",
            title="the script was started without a launcher, and there is no usable MPI to ask",
            sample="ImportError: libmpi.so.40: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="process+group+initialized",
            pattern=r"Default process group has not been initialized",
            tier=Tier.GENERIC,
            title="torch.distributed was used before it was initialized",
            fix="start with a launcher and call deepspeed.init_distributed() first",
            steps=(step("deepspeed --num_gpus 1 SCRIPT.py"),),
            sample="ValueError: Default process group has not been initialized, please make sure to call "
            "init_process_group.",
        ),
    ),
)

ACCELERATOR_NAME_INVALID = Rule(
    id="accelerator-name-invalid",
    stage=Stage.LAUNCH,
    title="DS_ACCELERATOR names an accelerator that cannot be used here{name_hint}",
    fix="set it to one that this DeepSpeed and torch know, or unset it",
    steps=(step("unset DS_ACCELERATOR"), instead("export DS_ACCELERATOR=cuda")),
    manual="""DS_ACCELERATOR names an accelerator that cannot be used here.

It must be one of cuda, cpu, xpu, npu, mps, hpu, mlu, sdaa, ... in lower case; an empty value is refused too.
Names other than cuda and cpu need their torch plug-in. Where it is not set, DeepSpeed looks for an accelerator
itself.

Why it matters: Importing DeepSpeed fails, and with it every build and every run.""",
    signatures=(
        Signature(
            words="ds_accelerator",
            pattern=r"DS_ACCELERATOR must be one of .{0,200}?(?:Value \"?'?(?P<name>[^'\"\s]{0,40})['\"]? is not "
            r"supported|$)",
            sample="ValueError: DS_ACCELERATOR must be one of ['cuda', 'cpu', 'xpu', 'xpu.external', 'npu', "
            "'mps', 'hpu', 'mlu', 'sdaa']. "
            'Value "gpu" is not supported',
        ),
        Signature(
            words="xpu_accelerator npu_accelerator sdaa_accelerator mps_accelerator hpu_accelerator "
            "mlu_accelerator supa_accelerator klxpu_accelerator xpu_external_accelerator",
            pattern=r"(?P<name>XPU|NPU|SDAA|MPS|HPU|MLU|SUPA|KLXPU|XPU_External)_Accelerator (?:external "
            r")?requires (?!(?:torch|intel)_)",
            sample="ValueError: MPS_Accelerator requires torch.mps, which is not installed on this system.",
        ),
    ),
)

RULES = (
    LAUNCHER_BACKEND_MISSING,
    MPI_ROOT_REFUSED,
    NUMACTL_MISSING,
    NO_LAUNCHER_ENV,
    ACCELERATOR_NAME_INVALID,
)
