"""Rules of the platform: Windows without NCCL, programs that are not on PATH, containers and clusters that start nothing."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

TORCH_WITHOUT_NCCL = Rule(
    id="torch-without-nccl",
    stage=Stage.RUN,
    title="this torch has no NCCL, with which ranks on GPUs talk: {why|it is built without it}",
    fix="Windows and macOS have no NCCL: take backend gloo (deepspeed.init_distributed(dist_backend='gloo')), or WSL2 "
    "or Linux; on "
    "Linux install a torch that is built for CUDA",
    steps=(
        step("python -m dsdoctor check"),
        step("python -c 'import torch; print(torch.distributed.is_nccl_available())'"),
    ),
    manual="""The ranks were to talk by NCCL, and torch cannot.

The builds of torch for Windows, for macOS and for CPUs have no NCCL. gloo works there, on one machine, and slowly.

Why it matters: The ranks cannot meet, so nothing is trained.""",
    signatures=(
        Signature(
            words="distributed+nccl+built",
            pattern=r"Distributed package doesn't have (?P<why>NCCL) built in",
            title="this torch is built without NCCL (on Windows it always is)",
            sample="RuntimeError: Distributed package doesn't have NCCL built in",
        ),
        Signature(
            words="processgroupnccl+gpus",
            pattern=r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            title="the ranks were to talk by NCCL, and no GPU is visible",
            fix="make the GPUs visible: the driver (nvidia-smi), --gpus all for a container, CUDA_VISIBLE_DEVICES, "
            "the scheduler's "
            "--gres; on a machine without GPUs take backend gloo and DS_ACCELERATOR=cpu",
            steps=(step("nvidia-smi"), step("python -m dsdoctor check")),
            sample="ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        ),
        Signature(
            words="use_libuv+libuv",
            pattern=r"use_libuv was requested but PyTorch was(?: not)? buil[dt] with(?:out)? (?P<why>libuv)",
            title="torch's store was to use {why}, and this torch (Windows) is built without it",
            fix="set USE_LIBUV=0 for all ranks, before the launcher starts",
            steps=(step("set USE_LIBUV=0", note="Windows"), instead("export USE_LIBUV=0")),
            sample="torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv "
            "support, run "
            "with USE_LIBUV=0 to disable it.",
        ),
        Signature(
            words="makedeviceforhostname makedeviceforinterface",
            pattern=r"makeDeviceFor(?:Hostname|Interface)\(\): unsupported (?P<why>gloo) device",
            title="gloo finds no network device that it can use (a known fault of torch for Windows)",
            fix="set GLOO_SOCKET_IFNAME to the name of a network interface and MASTER_ADDR to an address; on Windows "
            "take another "
            "release of torch, or WSL2",
            steps=(step("ipconfig /all", note="Windows"), instead("ip -br addr")),
            sample="RuntimeError: makeDeviceForHostname(): unsupported gloo device",
        ),
    ),
)

WINDOWS_LIBRARY_UNLOADABLE = Rule(
    id="windows-library-unloadable",
    stage=Stage.LOAD,
    title="Windows cannot load {file|a DLL} of {package|a package}: {why|a part that it needs is missing}",
    fix="install the Visual C++ redistributable (x64), then install that package again for this Python and CUDA",
    steps=(step("winget install Microsoft.VCRedist.2015+.x64", note="Windows"), step("python -m pip list")),
    manual="""A DLL of a package cannot be loaded: itself or one that it needs is missing, or there is too little
memory for it.

126: a DLL that it needs is missing, often the Visual C++ redistributable or libomp140. 127: it is of another version.
193: it is for 32 bit. 1455: the paging file is too small.

Why it matters: Importing the package fails.""",
    signatures=(
        Signature(
            words="winerror+1455",
            pattern=r"OSError: \[WinError 1455\].{0,140}?(?:Error loading \"(?P<file>[^\"]{1,160})\"|$)",
            title="Windows has too little virtual memory to load torch: the paging file is too small (WinError 1455)",
            fix="enlarge the paging file (System, Advanced, Performance, Virtual memory), and start fewer workers: "
            "each of them loads "
            "torch's DLLs anew (num_workers)",
            steps=(step("systempropertiesadvanced", note="Windows"),),
            sample="OSError: [WinError 1455] The paging file is too small for this operation to complete. Error "
            "loading "
            '"C:\\torch\\lib\\cufft64_10.dll" or one of its dependencies.',
        ),
        Signature(
            words="winerror+126 winerror+193 winerror+1114 winerror+127",
            pattern=r"OSError: \[WinError (?P<number>126|193|1114|127)\] (?P<why>[^.]{1,80})\.(?! "
            r"?.{0,160}(?:c10|torch_python)\.dll.{0,4}127)"
            r".{0,40}?Error loading \"(?P<file>[^\"]{1,160})\"",
            unless=r"WinError 127\].{0,160}(?:torch_python|c10|torch_cpu)\.dll",
            title="Windows cannot load {file}: {why} (WinError {number})",
            sample="OSError: [WinError 126] The specified module could not be found. Error loading "
            '"C:\\torch\\lib\\fbgemm.dll" or '
            "one of its dependencies.",
        ),
    ),
)

WINDOWS_PROGRAM_MISSING = Rule(
    id="windows-program-missing",
    stage=Stage.RUN,
    title="Windows does not find a program that Python was to start (WinError 2)",
    fix="see in the traceback which program: nvcc (CUDA toolkit), cl (Visual Studio Build Tools), git, ninja; start "
    "from the x64 Native Tools prompt, with that program on PATH. DeepSpeed's own df and ls exist on Linux only: a "
    "newer DeepSpeed, or WSL2",
    steps=(
        step("where nvcc cl git ninja", note="Windows"),
        instead("wsl --install", note="Windows"),
    ),
    manual="""CreateProcess was given the name of a program that is not on PATH.

The message does not name it; the frame above does (subprocess, check_output, cpp_extension).

Why it matters: The build or the import stops.""",
    signatures=(
        Signature(
            words="filenotfounderror+winerror+2",
            pattern=r"^FileNotFoundError: \[WinError 2\] [^:]{5,80}$",
            not_after=r"bin[/\\]nvcc",
            tier=Tier.GENERIC,
            sample="FileNotFoundError: [WinError 2] The system cannot find the file specified",
        ),
        Signature(
            words="c1083",
            pattern=r"C1083\b.{0,80}?: '(?P<file>windows\.h|winsdkver\.h|corecrt\.h|stddef\.h|crtdefs\.h|math\.h|strin"
            r"g\.h"
            r"|io\.h|basetsd\.h|assert\.h|limits\.h|float\.h)'",
            title="MSVC finds no {file}: the Windows SDK is not installed, or the prompt does not set INCLUDE",
            fix="install the workload 'Desktop development with C++' of the Visual Studio Build Tools with a Windows "
            "SDK, "
            "and build in its x64 Native Tools prompt",
            steps=(step("winget install Microsoft.VisualStudio.2022.BuildTools", note="Windows"),),
            sample="csrc\\includes\\StopWatch.h(3): fatal error C1083: Cannot open include file: 'windows.h': No such "
            "file "
            "or directory",
        ),
    ),
)


def not_found(programs: str) -> str:
    """What shells print of a program that is not on PATH.

    >>> import re
    >>> bool(re.search(not_found("deepspeed"), "bash: deepspeed: command not found"))
    True
    """
    return (
        rf"(?:^|[\s:'\"])(?P<program>{programs})['\"]?: (?:command )?not found$|command not found: (?P<program2>{programs})$"
        rf"|^'?(?P<program3>{programs})'? is not recognized as an internal or external"
    )


COMMAND_NOT_FOUND = Rule(
    id="command-not-found",
    stage=Stage.LAUNCH,
    title="the program {program} is not on PATH here: its package is not installed, or its environment is not active",
    fix="activate the environment (conda, venv) in the script that starts the job, on every node; or call the program "
    "by its whole "
    "path, or as a module of the right python",
    steps=(step("echo $PATH"),),
    manual="""The shell does not find a program by its name.

deepspeed, torchrun, accelerate, llamafactory-cli and swift are small programs in the bin folder of the Python
environment into which their package was installed. A batch job, ssh or sudo does not have the PATH of your own shell.

Why it matters: Nothing was started at all.""",
    signatures=(
        Signature(
            words="deepspeed+found ds_report+found deepspeed+recognized ds_report+recognized",
            pattern=not_found("deepspeed|ds_report"),
            steps=(
                step("python -m pip install deepspeed"),
                step("python -m deepspeed.launcher.runner --help", note="the same program, wherever PATH leads"),
            ),
            sample="train.sh: line 12: deepspeed: command not found",
        ),
        Signature(
            words="torchrun+found torchrun+recognized",
            pattern=not_found("torchrun"),
            steps=(step("python -m torch.distributed.run --help", note="the same program, wherever PATH leads"),),
            sample="bash: torchrun: command not found",
        ),
        Signature(
            words="accelerate+found accelerate+recognized cli+found cli+recognized swift+found swift+recognized "
            "axolotl+found ray+found "
            "openrlhf+found xtuner+found",
            pattern=not_found("accelerate|llamafactory-cli|swift|axolotl|ray|xtuner|huggingface-cli"),
            steps=(step("python -m pip show {program}"), step("python -m pip install {program}")),
            sample="zsh: command not found: accelerate",
        ),
        Signature(
            words="python+found python3+found conda+found pip+found pip3+found nvcc+found python+recognized "
            "pip+recognized",
            pattern=not_found("python3?|conda|pip3?|nvidia-smi"),
            steps=(step("command -v python3 python"), step("echo $PATH")),
            sample="/bin/sh: 1: python: not found",
        ),
        Signature(
            words="execve+file execve+permission",
            pattern=r"(?:slurmstepd|srun): error: execve\(\): (?P<program>\S{1,160}): (?:No such file or "
            r"directory|Permission denied)",
            title="Slurm cannot start {program} on the node: it is not on PATH there, or not executable",
            fix="give the whole path of the program, or activate the environment in the batch script before srun; "
            "inside of a "
            "container it must be there, too",
            steps=(step("srun --ntasks 1 bash -lc 'command -v python'"),),
            sample="slurmstepd: error: execve(): python: No such file or directory",
        ),
    ),
)

CONTAINER_WITHOUT_DRIVER = Rule(
    id="container-without-driver",
    stage=Stage.LAUNCH,
    title="the container could not be started with GPUs: {why|the host's NVIDIA driver is not loaded}",
    fix="see that nvidia-smi works on the host itself (install or load the driver, reboot after an update), then "
    "restart docker",
    steps=(step("nvidia-smi"), step("sudo systemctl restart docker")),
    manual="""nvidia-container-cli sets up the GPUs of a container, and the host's driver did not answer it.

Why it matters: The container is not started.""",
    signatures=(
        Signature(
            words="nvidia+container+cli",
            pattern=r"nvidia-container-cli: (?!.{0,60}requirement error)(?P<why>(?:initialization|detection|mount|devi"
            r"ce|ldcache) "
            r"error: .{1,120})",
            sample="nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        ),
        Signature(
            words="nvidia+container+requirement unsatisfied+condition",
            pattern=r"(?P<why>requirement error: unsatisfied condition: cuda.{1,80})",
            title="the image is for a newer CUDA than the host's driver: {why}",
            fix="take an image for an older CUDA, or upgrade the host's NVIDIA driver",
            steps=(step("nvidia-smi"),),
            sample="nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your "
            "driver to a newer "
            "version, or use an earlier cuda container: unknown.",
        ),
    ),
)

POD_NOT_PLACED = Rule(
    id="pod-not-placed",
    stage=Stage.LAUNCH,
    title="Kubernetes finds no node for the pod: {why}",
    fix="ask for what a node has (nvidia.com/gpu, memory, cpu in resources), for its labels and taints (nodeSelector, "
    "tolerations), "
    "or wait for other jobs; the device plugin must run for nvidia.com/gpu to exist",
    steps=(
        step("kubectl describe pod POD"),
        step("kubectl get nodes -o custom-columns=NAME:.metadata.name,GPU:.status.allocatable.nvidia\\.com/gpu"),
    ),
    manual="""The scheduler of Kubernetes names for each reason how many nodes it rules out.

Why it matters: The pod waits, and ranks in other pods wait for it until their time is up.""",
    signatures=(
        Signature(
            words="nodes+available",
            pattern=r"\b\d{1,5}/\d{1,5} nodes are available: (?P<why>.{1,160})",
            sample="Warning  FailedScheduling  2m  default-scheduler  0/5 nodes are available: 5 Insufficient "
            "nvidia.com/gpu.",
        ),
        Signature(
            words="imagepullbackoff errimagepull pull+image manifest+unknown",
            pattern=r"(?P<why>\b(?:ImagePullBackOff|ErrImagePull)\b|Failed to pull image \S{1,160}|manifest (?:for "
            r"\S{1,160} not "
            r"found|unknown))",
            title="the image of the container cannot be fetched: {why}",
            fix="correct the image's name and tag; a private registry needs imagePullSecrets (kubernetes) or docker "
            "login",
            steps=(step("kubectl describe pod POD"), instead("docker pull IMAGE")),
            sample="Warning  Failed  kubelet  Error: ErrImagePull",
        ),
    ),
)

HOST_NAME_UNRESOLVED = Rule(
    id="host-name-unresolved",
    stage=Stage.LAUNCH,
    title="a host's name does not resolve on this node{host_hint}",
    fix="give MASTER_ADDR (and the hostfile) names or addresses that every node resolves; inside of a container "
    "/etc/hosts and DNS are its own",
    steps=(step("getent hosts {host|HOST}"), step("cat /etc/hosts")),
    manual="""A program asked for the address of a host by its name, and got none.

Names such as node1 are known where the scheduler or /etc/hosts says them; a pod's name needs a headless service.

Why it matters: The ranks do not meet.""",
    signatures=(
        Signature(
            words="gaierror",
            pattern=r"^(?:socket\.)?gaierror: \[Errno -[235]\]",
            not_after=r"torch[/\\]distributed|init_process_group|rendezvous|mpi_discovery|deepspeed[/\\]comm",
            tier=Tier.GENERIC,
            sample="socket.gaierror: [Errno -2] Name or service not known",
        ),
        Signature(
            words="distnetworkerror+address",
            pattern=r"DistNetworkError: The client socket has failed to connect to any network address of "
            r"\((?P<host>[\w.:-]{1,80}), (?P<port>\d{1,5})\)",
            title="{host}, port {port}, cannot be reached from this node: nothing listens there, or a firewall drops "
            "it",
            fix="see that rank 0's node has started and is {host} (MASTER_ADDR), that the port is the same on all "
            "nodes and open between them, and that the "
            "name leads to the address that the nodes share",
            steps=(step("getent hosts {host|HOST}"), step("nc -zv {host|HOST} {port|29500}")),
            sample="torch.distributed.DistNetworkError: The client socket has failed to connect to any network "
            "address of (master-0, 29500).",
        ),
    ),
)

RULES = (
    HOST_NAME_UNRESOLVED,
    TORCH_WITHOUT_NCCL,
    WINDOWS_LIBRARY_UNLOADABLE,
    WINDOWS_PROGRAM_MISSING,
    COMMAND_NOT_FOUND,
    CONTAINER_WITHOUT_DRIVER,
    POD_NOT_PLACED,
)
