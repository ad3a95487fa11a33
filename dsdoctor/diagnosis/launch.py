"""Ills of launching: hostfile, ssh, MPI, the launcher's programs and variables."""

from dsdoctor.diagnosis.nouns import Rule, Signature, Stage, Tier

HOSTFILE_MALFORMED = Rule(
    id="hostfile-malformed",
    stage=Stage.LAUNCH,
    title="the hostfile cannot be used{entry_hint}",
    fix='write one line a host, "name slots=N", each host once, no blanks around "="',
    commands=("printf 'node1 slots=8\\nnode2 slots=8\\n' > hostfile", "deepspeed --hostfile hostfile ..."),
    manual="""A hostfile has one line a host: `node1 slots=8`. Blanks around `=`, `node1:8`, a host twice or an empty
file are refused; a hostfile that does not exist is only a warning, and then one node trains alone.""",
    signatures=(
        Signature(
            words="hostfile",
            pattern=r"Hostfile contains (?:a bad entry: (?P<entry>.{1,80}?)|multiple entries for "
            r"(?P<entry2>\S{1,160}?)|duplicate hosts), ?(?:unable|$)?"
            r"|Hostfile is (?:empty or )?not formatted correctly|no extra nodes available via hostfile",
            sample="ValueError: Hostfile contains a bad entry: worker-1 slots = 8, unable to proceed with launching",
        ),
        Signature(
            words="hostname+hostfile",
            pattern=r"Hostname '(?P<entry>[^']{0,80})' not found in hostfile",
            after=r"Unable to find hostfile",
            title="there is no hostfile where the launcher looks, so {entry} is not in it",
            fix="name the hostfile (default: /job/hostfile), or drop --include and --exclude on one node",
            commands=("deepspeed --hostfile PATH ...",),
            sample="[WARNING] [runner.py:214:fetch_hostfile] Unable to find hostfile, will proceed with training with "
            "local resources only.\nValueError: Hostname 'worker-1' not found in hostfile",
        ),
        Signature(
            words="host+defined",
            pattern=r"Error: host (?P<entry>\S{1,160}) is already defined",
            sample="ValueError: host worker-1 is already defined",
        ),
        Signature(
            words="unpack+expected",
            pattern=r"ValueError: not enough values to unpack \(expected 2, got 1\)",
            after=r"in fetch_hostfile|# fetch_hostfile",
            sample="    hostname, slots = line.split()  # fetch_hostfile\nValueError: not enough values to "
            "unpack (expected 2, got 1)",
        ),
        Signature(
            words="hostfile",
            pattern=r"Bad hostfile text: (?P<entry>.{1,80})",
            tier=Tier.GENERIC,
            sample="[ERROR] [runner.py:300:fetch_hostfile] Bad hostfile text: ['worker-1\\n']",
        ),
    ),
)

LAUNCHER_BACKEND_MISSING = Rule(
    id="launcher-backend-missing",
    stage=Stage.LAUNCH,
    title="the launcher needs {launcher}, and it is not installed here",
    fix="install it on the node that launches, or launch without it (torchrun on each node, or one node only)",
    commands=("sudo apt install {launcher_package}", "python -m dsdoctor check"),
    manual="""deepspeed starts several nodes (and autotuning even one) through a program: pdsh by default, or mpirun,
srun, mpiexec. It must be on PATH of the node where you launch. On one node drop the hostfile; on several, torchrun on
each node needs none of them.""",
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
            r"|mpichversion)['\"]?: (?:command )?not found|command not found: (?P<launcher3>pdsh|mpirun|mpiexec|srun)$"
            r"|No such file or directory: '(?P<launcher2>pdsh|mpirun|mpiexec|srun|ompi_info|mpichversion)'",
            sample="/bin/sh: 1: pdsh: not found",
        ),
        Signature(
            words="insecure",
            pattern=r"(?P<launcher>pdsh)@\S{1,160}: module path \"[^\"]{1,80}\" insecure",
            title="{launcher} refuses its own module folder: it is not owned by root",
            fix="give the folder to root, or name the ssh module in PDSH_RCMD_TYPE",
            commands=("export PDSH_RCMD_TYPE=ssh",),
            sample='pdsh@node0: module path "/usr/lib/x86_64-linux-gnu/pdsh" insecure.',
        ),
    ),
)

SSH_UNREACHABLE = Rule(
    id="ssh-unreachable",
    stage=Stage.LAUNCH,
    title="{host|a host of the hostfile} cannot be reached by ssh without a password",
    fix="let the launching node log in to every host (itself too) with a key; on one node remove the hostfile",
    commands=(
        "ssh -o BatchMode=yes -o ConnectTimeout=5 {host|HOST} true",
        "ssh-copy-id {host|HOST}",
        "python -m dsdoctor comm",
    ),
    manual="""The launcher starts the other nodes by ssh, without a terminal: a password, an unknown host key, a
firewall or a name that does not resolve stops it, and DeepSpeed hides what ssh said. `ssh -o BatchMode=yes HOST true`
must succeed from the launching node to every host of the hostfile. Inside containers sshd must run, on the port that
ssh uses.""",
    signatures=(
        Signature(
            words="ssh",
            pattern=r"Using hostfile at .{1,200} but host=(?P<host>[\w.:-]+) was not reachable via ssh",
            sample="RuntimeError: Using hostfile at /job/hostfile but host=worker-1 was not reachable via ssh. "
            "If you are running with a single "
            "node please remove /job/hostfile or setup passwordless ssh.",
        ),
        Signature(
            words="permission+denied",
            pattern=r"(?:(?P<user>[\w.-]+)@(?P<host>[\w.:-]+): )?Permission denied \((?:publickey|password|gssapi"
            r"|keyboard)|Permission denied, please try again",
            title="{host|the host} refuses the login: no key of this node is known there",
            sample="root@worker-1: Permission denied (publickey,password).",
        ),
        Signature(
            words="key+verification identification+changed",
            pattern=r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
            title="the host's key is unknown to this node, or has changed",
            fix="accept the hosts' keys once, on every node",
            commands=("ssh-keyscan -H {host|HOST} >> ~/.ssh/known_hosts",),
            sample="Host key verification failed.",
        ),
        Signature(
            words="ssh",
            pattern=r"ssh: connect to host (?P<host>[\w.:-]+) port (?P<port>\d+): (?P<why>[^\r\n]{1,80})",
            title="ssh to {host}, port {port}: {why}",
            sample="ssh: connect to host worker-1 port 22: Connection refused",
        ),
        Signature(
            words="ssh+resolve",
            pattern=r"ssh: Could not resolve hostname (?P<host>[\w.-]+)",
            title="the name {host} of the hostfile does not resolve on this node",
            commands=("getent hosts {host}",),
            sample="ssh: Could not resolve hostname worker-9: Name or service not known",
        ),
        Signature(
            words="ssh+hostname",
            pattern=r"Command 'ssh .{0,100}?(?P<host>[\w.:-]{1,80}) hostname(?: -I)?' returned non-zero",
            sample="subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no worker-1 hostname' returned "
            "non-zero exit status 255.",
        ),
        Signature(
            words="suitable",
            pattern=r"Unable to detect suitable master address via",
            title="the launcher could not ask the first host for its address by ssh",
            sample="RuntimeError: Unable to detect suitable master address via `hostname -I`, please manually "
            "specify one via --master_addr",
        ),
        Signature(
            words="orte plm prte ssh authentication",
            pattern=r"(?:ORTE|PRTE|PLM).{0,40}unable to (?:reliably )?start one or more daemons|ssh exited with "
            r"exit code 255|Too many authentication failures"
            r"|ssh: not found",
            tier=Tier.GENERIC,
            sample="pdsh@node0: worker-1: ssh exited with exit code 255",
        ),
    ),
)

MPI_ROOT_REFUSED = Rule(
    id="mpi-root-refused",
    stage=Stage.LAUNCH,
    title="{program|mpirun} refuses to run as root",
    fix="run as another user, or allow root in a container that is yours alone",
    commands=("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "mpirun --allow-run-as-root ..."),
    manual="""Open MPI does not start as root unless told to. In a container, set OMPI_ALLOW_RUN_AS_ROOT=1 and
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or pass --allow-run-as-root (deepspeed: --launcher_args).""",
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
    commands=("sudo apt install numactl",),
    manual="""deepspeed --bind_cores_to_rank starts each rank through the program numactl. Install it, or launch
without that option.""",
    signatures=(
        Signature(
            words="numactl",
            pattern=r"please install the numactl package|No such file or directory: '?\"?numactl|numactl: "
            r"(?:command )?not found",
            sample="FileNotFoundError: [Errno 2] No such file or directory: 'numactl'",
        ),
    ),
)

RESOURCE_FILTER_INVALID = Rule(
    id="resource-filter-invalid",
    stage=Stage.LAUNCH,
    title="the launcher was asked for {what|hosts or slots} that the hostfile does not have",
    fix="ask only for what the hostfile has, in the form --include 'host1:0,1@host2:0'",
    commands=("cat /job/hostfile", "python -m dsdoctor check"),
    manual="""--include and --exclude name hosts and slots of the hostfile (slots count from 0), one of them at a
time, and not together with --num_gpus or --num_nodes; mpirun counts the slots as well. CUDA_VISIBLE_DEVICES is turned
into such a filter by the launcher.""",
    signatures=(
        Signature(
            words="hostname+hostfile",
            pattern=r"Hostname '(?P<what>[^']{0,80})' not found in hostfile",
            not_after=r"Unable to find hostfile",
            sample="ValueError: Hostname 'worker-7' not found in hostfile",
        ),
        Signature(
            words="slot+host",
            pattern=r"No slot '(?P<slot>[^']{0,20})' specified on host '(?P<what>[^']{0,80})'",
            title="slot {slot} of {what} is asked for, and the hostfile does not have it",
            sample="ValueError: No slot '8' specified on host 'worker-1'",
        ),
        Signature(
            words="mutually+exclusive include+exclude limiting+nodes exclusion",
            pattern=r"include_str and exclude_str are mutually exclusive|Cannot specify num_nodes/gpus with "
            r"include/exclude"
            r"|backend does not support (?:worker include|limiting num nodes)",
            title="filters that exclude each other, or that this launcher does not have",
            sample="ValueError: Cannot specify num_nodes/gpus with include/exclude",
        ),
        Signature(
            words="unpack",
            pattern=r"ValueError: (?:too many|not enough) values to unpack",
            after=r"parse_node_config|parse_resource_filter|parse_inclusion_exclusion",
            title="--include or --exclude is not of the form 'host1:0,1@host2:0'",
            sample='  File "/v/deepspeed/launcher/runner.py", line 286, in parse_node_config_list\n'
            "ValueError: too many values to unpack (expected 2)",
        ),
        Signature(
            words="slots+enough",
            pattern=r"There are not enough slots available in the system",
            title="more ranks are asked for than the hosts have slots",
            sample="There are not enough slots available in the system to satisfy the 4",
        ),
    ),
)

NO_LAUNCHER_ENV = Rule(
    id="no-launcher-env",
    stage=Stage.RUN,
    title="the script was started without a launcher: {variable|RANK} is not set",
    fix="start it with a launcher, or set the variables for a single process",
    commands=(
        "deepspeed --num_gpus 1 SCRIPT.py",
        "torchrun --nproc_per_node 1 SCRIPT.py",
        "export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
    ),
    manual="""deepspeed and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where one is unset
(plain python, a notebook, srun), DeepSpeed asks MPI instead, and fails on mpi4py. Installing mpi4py is seldom the
cure: use a launcher.""",
    signatures=(
        Signature(
            words="mpi4py",
            pattern=r"No module named '?mpi4py",
            title="RANK and WORLD_SIZE are unset, so DeepSpeed asked MPI, and mpi4py is not installed",
            sample="ModuleNotFoundError: No module named 'mpi4py'",
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
            commands=("deepspeed --num_gpus 1 SCRIPT.py",),
            sample="ValueError: Default process group has not been initialized, please make sure to call "
            "init_process_group.",
        ),
    ),
)

ACCELERATOR_NAME_INVALID = Rule(
    id="accelerator-name-invalid",
    stage=Stage.LAUNCH,
    title="DS_ACCELERATOR names an accelerator that cannot be had here{name_hint}",
    fix="set it to one that this DeepSpeed and torch know, or unset it",
    commands=("unset DS_ACCELERATOR", "export DS_ACCELERATOR=cuda"),
    manual="""DS_ACCELERATOR must be one of cuda, cpu, xpu, npu, mps, hpu, mlu, sdaa, ... in lower case; set to
nothing it is refused too, and names other than cuda and cpu need their torch plug-in. Unset it to let DeepSpeed look
for itself.""",
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
    HOSTFILE_MALFORMED,
    LAUNCHER_BACKEND_MISSING,
    SSH_UNREACHABLE,
    MPI_ROOT_REFUSED,
    NUMACTL_MISSING,
    RESOURCE_FILTER_INVALID,
    NO_LAUNCHER_ENV,
    ACCELERATOR_NAME_INVALID,
)
