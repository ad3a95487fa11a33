"""Rules of how a launcher is called: its options, Slurm's steps, nodes that do not come to torchrun's rendezvous."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

LAUNCH_OPTION_WRONG = Rule(
    id="launch-option-wrong",
    stage=Stage.LAUNCH,
    title="the launcher was called with options that it does not take{option_hint}",
    fix="write the launcher's options before the name of the script, and the script's own after it",
    steps=(step("deepspeed --help"), instead("torchrun --help"), instead("accelerate launch --help")),
    manual="""The launcher itself refused its command line, so no rank was started.

What stands before the script's name is for the launcher, what stands after it for the script. deepspeed has --num_gpus
and --num_nodes, torchrun --nproc-per-node and --nnodes, accelerate --num_processes and --num_machines.

Why it matters: Nothing runs until the command line is right.""",
    signatures=(
        Signature(
            words="deepspeed+unrecognized torchrun+unrecognized accelerate+unrecognized runner+unrecognized",
            pattern=r"^(?P<launcher>deepspeed|torchrun|accelerate|runner\.py)(?: <command> \[<args>\](?: launch)?)?: "
            r"error: unrecognized arguments: (?P<option>.{1,120})",
            title="{launcher} does not know {option}: what is meant for the script stands after the script's name",
            sample="deepspeed: error: unrecognized arguments: --num_gpu 2",
        ),
        Signature(
            words="deepspeed+arguments+required torchrun+arguments+required runner+arguments+required",
            pattern=r"^(?P<launcher>deepspeed|torchrun|runner\.py): error: the following arguments are required: "
            r"(?P<option>user_script|training_script).{0,60}",
            title="{launcher} was not told which script to run",
            fix="name the script, after the launcher's options; an option with a value that is missing takes the "
            "script's name as its value",
            sample="deepspeed: error: the following arguments are required: user_script, user_args",
        ),
        Signature(
            words="deepspeed+argument torchrun+argument runner+argument accelerate+argument",
            pattern=r"^(?P<launcher>deepspeed|torchrun|accelerate|runner\.py)(?: <command> \[<args>\](?: launch)?)?: "
            r"error: argument (?P<option>--?[\w/-]{1,80}(?:, --[\w-]{1,40})?): (?P<why>.{1,120})",
            title="{launcher} does not take this value of {option}: {why}",
            fix="correct the value; --help says what the option takes",
            sample="accelerate <command> [<args>] launch: error: argument --machine_rank/--machine-rank: invalid int "
            "value: 'x'",
        ),
        Signature(
            words="nproc_per_node+value",
            pattern=r"ValueError: Unsupported nproc_per_node value: (?P<option>.{1,60})",
            title="torchrun --nproc-per-node is {option}, which is neither a number nor gpu, cpu or auto",
            fix="give a number, or gpu for one rank on each GPU",
            steps=(step("torchrun --nproc-per-node gpu SCRIPT.py"),),
            sample="ValueError: Unsupported nproc_per_node value: gpus",
        ),
        Signature(
            words="no_python+module no+python+module",
            pattern=r"ValueError: Don't use both the '--no[_-]python' flag and the '--module' flag",
            title="--no_python and --module exclude each other",
            fix="leave one of the two out",
            sample="ValueError: Don't use both the '--no_python' flag and the '--module' flag at the same time.",
        ),
        Signature(
            words="node_rank+ssh",
            pattern=r"AssertionError: Launching training without ssh, but --node_rank is not set correctly",
            title="with --no_ssh each node needs its own --node_rank, from 0 to the number of hosts less one",
            fix="start deepspeed on every node, with the same hostfile, --master_addr and --master_port, and "
            "--node_rank 0, 1, ...",
            steps=(step("deepspeed --hostfile hostfile --no_ssh --node_rank 0 --master_addr HOST SCRIPT.py"),),
            sample="AssertionError: Launching training without ssh, but --node_rank is not set correctly.",
        ),
        Signature(
            words="unknown+launcher",
            pattern=r"NotImplementedError: Unknown launcher (?P<option>\S{1,60})",
            title="deepspeed has no launcher {option}",
            fix="--launcher is pdsh, openmpi, mpich, impi, mvapich or slurm",
            sample="NotImplementedError: Unknown launcher mpirun",
        ),
        Signature(
            words="devices+node+requires",
            pattern=r"ValueError: (?P<launcher>MPICH|Intel MPI|mvapich) requires same number of devices per node",
            title="{launcher} needs the same number of slots on every host",
            fix="give every host of the hostfile the same slots=N, and filter no single slots out",
            sample="ValueError: MPICH requires same number of devices per node",
        ),
        Signature(
            words="file+directory+rank should+directory",
            pattern=r"ValueError: (?P<option>\S{1,200}) should not be a file, it should be a directory",
            title="--enable_each_rank_log names the file {option}, and needs a folder",
            fix="name a folder; it is made where it does not exist",
            sample="ValueError: logs.txt should not be a file, it should be a directory.",
        ),
        Signature(
            words="multi_gpu+processes",
            pattern=r"ValueError: You need to use at least 2 processes to use `--multi_gpu`",
            title="accelerate launch --multi_gpu needs at least two processes",
            fix="give --num_processes 2 or more; for DeepSpeed use --use_deepspeed instead of --multi_gpu",
            steps=(step("accelerate launch --use_deepspeed --num_processes 2 SCRIPT.py"),),
            sample="ValueError: You need to use at least 2 processes to use `--multi_gpu`.",
        ),
        Signature(
            words="num_processes+manually",
            pattern=r"ValueError: You need to manually pass in `--num_processes` using this config yaml",
            title="accelerate's configuration does not say how many processes to start",
            fix="give --num_processes: all processes of all machines together",
            steps=(step("accelerate launch --num_processes 2 SCRIPT.py"),),
            sample="ValueError: You need to manually pass in `--num_processes` using this config yaml.",
        ),
    ),
)

LAUNCH_RANKS_CONTRADICT = Rule(
    id="launch-ranks-contradict",
    stage=Stage.LAUNCH,
    title="two launchers tell this process different ranks ({here|one} and {there|another})",
    fix="start the ranks with one launcher only, and set args.local_rank from the variable LOCAL_RANK; do not "
    "start torchrun or deepspeed inside of mpirun or srun with several tasks",
    steps=(step("env | grep -E 'RANK|WORLD_SIZE|MASTER|SLURM_(PROC|LOCAL)ID|OMPI_COMM'"),),
    manual="""RANK and LOCAL_RANK, the variables of MPI, and the script's own --local_rank must not contradict each other.

Variables that an earlier job exported, a launcher inside of another one, or a --local_rank that is fixed in the
script's defaults do that.

Why it matters: Ranks would use each other's GPUs, so DeepSpeed stops.""",
    signatures=(
        Signature(
            words="mismatch+local+rank",
            pattern=r"AssertionError: Mismatch in local rank setting, args\.local_rank=(?P<here>-?\d{1,5}) but "
            r"env\['LOCAL_RANK'\]=(?P<there>-?\d{1,5})",
            title="args.local_rank is {here}, and the launcher's LOCAL_RANK is {there}",
            sample="AssertionError: Mismatch in local rank setting, args.local_rank=0 but env['LOCAL_RANK']=1.",
        ),
        Signature(
            words="ompi_comm_world_local_rank",
            pattern=r"AssertionError: LOCAL_RANK \((?P<here>[^)]{0,20})\) != OMPI_COMM_WORLD_LOCAL_RANK "
            r"\((?P<there>[^)]{0,20})\)",
            title="LOCAL_RANK is {here}, and MPI's OMPI_COMM_WORLD_LOCAL_RANK is {there}",
            sample="AssertionError: LOCAL_RANK (0) != OMPI_COMM_WORLD_LOCAL_RANK (1), not sure how to proceed as "
            "we're seeing conflicting local rank info.",
        ),
        Signature(
            words="mpi+torch+match",
            pattern=r"AssertionError: MPI (?P<what>rank|world size) (?P<here>\d{1,6}) does not match torch "
            r"(?:rank|world size) (?P<there>\d{1,6})",
            title="MPI's {what} is {here}, and torch's is {there}",
            sample="AssertionError: MPI rank 1 does not match torch rank 0",
        ),
        Signature(
            words="rank+number+env rank+number+match local_rank+number+match",
            pattern=r"(?:OSError|EnvironmentError): (?P<what>(?:local_)?rank number (?:is not in current env|doesn't "
            r"match))!",
            title="the MPI launcher's variables of the rank are missing or contradict each other: {what}",
            fix="start with the mpiexec of MPICH that --launcher mpich expects (it sets PMIX_RANK or PMI_RANK, and "
            "PALS_LOCAL_RANKID or MPI_LOCALRANKID)",
            sample="OSError: rank number is not in current env!",
        ),
    ),
)

SLURM_REFUSED = Rule(
    id="slurm-refused",
    stage=Stage.LAUNCH,
    title="Slurm refuses the job or its step: {reason|it cannot be placed}",
    fix="compare what is asked for (--nodes, --ntasks, --cpus-per-task, --gpus, --mem, --partition) with what the "
    "job and the partition have",
    steps=(step("scontrol show job JOB"), step("sinfo -o '%P %D %c %m %G %l'")),
    manual="""Slurm did not start the processes, and says why.

A step (srun inside of a job) can have no more nodes, processors, memory and GPUs than its job; a job no more than its
partition and account allow.

Why it matters: No rank was started, so nothing of the training itself has failed.""",
    signatures=(
        Signature(
            words="srun+create+step",
            pattern=r"srun: error: Unable to create step for job (?P<job>\d{1,12}): (?P<reason>.{1,120})",
            title="Slurm cannot make a step in job {job}: {reason}",
            fix="give srun no more --nodes, --ntasks, --cpus-per-task, --mem and --gpus than the job itself has (a "
            "step that still runs holds its part; --overlap shares it)",
            steps=(step("scontrol show job {job}"),),
            sample="srun: error: Unable to create step for job 238051: More processors requested than permitted",
        ),
        Signature(
            words="slurm+controller slurm_persist_conn_open",
            pattern=r"(?:srun|sbatch|salloc|scontrol|squeue): error: .{0,80}Unable to contact slurm controller",
            title="Slurm's controller does not answer",
            fix="see whether the controller runs and this node reaches it; inside of a container Slurm's "
            "configuration and munge socket must be there",
            steps=(step("scontrol ping"),),
            sample="srun: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)",
        ),
        Signature(
            words="srun+allocate+resources salloc+allocate sbatch+submission srun+confirm+allocation",
            pattern=r"(?:srun|salloc|sbatch): error: (?:Unable to allocate resources|Batch job submission failed|Job "
            r"submit/allocate failed|Unable to confirm allocation for job \d{1,12}): "
            r"(?!Unable to contact)(?P<reason>.{1,120})",
            sample="sbatch: error: Batch job submission failed: Requested node configuration is not available",
        ),
        Signature(
            words="launch+failed+node",
            pattern=r"srun: error: Task launch for \S{1,40} failed on node (?P<node>\S{1,80}): (?P<reason>.{1,100})",
            title="Slurm cannot start a task on node {node}: {reason}",
            fix="see what the node's slurmd says; it may be drained, or not know the user or the folder",
            steps=(step("scontrol show node {node}"),),
            sample="srun: error: Task launch for StepId=12.0 failed on node n3: Invalid job credential",
        ),
    ),
)

MPI_PROGRAM_MISSING = Rule(
    id="mpi-program-missing",
    stage=Stage.LAUNCH,
    title="{program} does not find the program that it should start",
    fix="name the program by its whole path (the same on every host), after mpirun's own options; python must be "
    "the one of your environment on every host",
    steps=(step("mpirun -np 1 $(which python) SCRIPT.py"),),
    manual="""mpirun looked for the program to start on a host, and it is not there or not executable.

mpirun takes the first word that is no option as the program. An environment that is active in your shell is not on the
other hosts, unless their PATH has it (-x PATH).

Why it matters: No rank was started on that host.""",
    signatures=(
        Signature(
            words="mpirun+unable mpiexec+unable prterun+unable",
            pattern=r"^(?P<program>mpirun|mpiexec|prterun) was unable to (?:find the specified executable file|launch "
            r"the specified application as it could not access)",
            sample="mpirun was unable to find the specified executable file, and therefore did not launch the job.",
        ),
    ),
)

RENDEZVOUS_CLOSED = Rule(
    id="rendezvous-closed",
    stage=Stage.LAUNCH,
    title="this node came to a torchrun rendezvous that is already over",
    fix="read the logs of the other nodes: their ranks had ended or failed. Then start all nodes again together, "
    "with a new --rdzv-id",
    steps=(step("torchrun --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id NEW --nnodes N ..."),),
    manual="""The nodes of a torchrun job meet at a rendezvous, and it was closed before or while this node waited.

A node closes it when its ranks have ended, or have failed more often than --max-restarts allows. A --rdzv-id that an
earlier job used (with etcd, or a node of it that still runs) is closed as well.

Why it matters: What this log says only follows; the cause is in the log of the node that ended first.""",
    signatures=(
        Signature(
            words="rendezvousclosederror",
            pattern=r"^(?:[\w.]{1,80}\.)?RendezvousClosedError\b",
            tier=Tier.GENERIC,
            sample="torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        ),
    ),
)

RENDEZVOUS_INCOMPLETE = Rule(
    id="rendezvous-incomplete",
    stage=Stage.LAUNCH,
    title="the other nodes did not join torchrun's rendezvous in time, which wants {nodes|several} nodes: see first whether the "
    "command was run on all of them",
    fix="start it on every node (under Slurm put srun in front, one task a node, with each node's own --node_rank or "
    "--machine_rank $SLURM_NODEID). If all did start, compare --rdzv-endpoint, --rdzv-backend, --rdzv-id and --nnodes in "
    "their logs. Only then look for a firewall; where nodes start late, raise --rdzv-conf join_timeout=SECONDS",
    steps=(
        step("python -m dsdoctor comm"),
        step(
            "srun --nodes=N --ntasks-per-node=1 torchrun --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:29400 ..."
        ),
    ),
    manual="""A node waited at torchrun's rendezvous until the timeout, and fewer nodes than --nnodes had come.

In an sbatch script a command without srun runs on the first node alone. Nodes that were given another endpoint, port,
backend or run id wait for each other in two places. A node that cannot reach the endpoint says so in its own log.

Why it matters: No rank was started: neither the GPUs nor NCCL had been tried.""",
    signatures=(
        Signature(
            words="rendezvoustimeouterror",
            pattern=r"(?:^(?:[\w.]{1,80}\.)?|\"message\": \"(?:[\w.]{1,80}\.)?)RendezvousTimeoutError\b",
            tier=Tier.GENERIC,
            sample="torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ),
    ),
)

RULES = (
    LAUNCH_OPTION_WRONG,
    LAUNCH_RANKS_CONTRADICT,
    SLURM_REFUSED,
    MPI_PROGRAM_MISSING,
    RENDEZVOUS_CLOSED,
    RENDEZVOUS_INCOMPLETE,
)
