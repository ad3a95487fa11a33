"""Rules of files and folders: not there, not allowed, moved by another rank."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

FILE_MISSING = Rule(
    id="file-missing",
    stage=Stage.RUN,
    title="the file or folder {path} is not there (seen from the folder in which the rank runs)",
    fix="correct the path: a relative one counts from the folder in which the ranks run, and it must be there on "
    "every node and in the "
    "container. If only some ranks fail, another rank made, moved or removed it: let rank 0 do that, and the others "
    "wait (barrier)",
    steps=(step("pwd"), step("ls -ld {path}")),
    explained_by=(
        "checkpoint-shard-missing",
        "checkpoint-not-found",
        "host-compiler-missing",
        "ninja-missing",
        "launcher-backend-missing",
        "numactl-missing",
        "deepspeed-setup-bug",
        "cuda-home-wrong",
        "cuda-toolkit-missing",
        "known-regression",
        "pip-requirements-missing",
    ),
    manual="""Python was asked for a file or a folder that does not exist where the process looks.

Why it matters: The rank ends; the others report a broken connection or wait.""",
    signatures=(
        Signature(
            words="filenotfounderror",
            pattern=r"^FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[\w.+-]{1,60})'",
            after=r"in _execute_child",
            unless=r"'(?:c\+\+|g\+\+|gcc|ninja|nvcc|cl|which|pdsh|mpirun|mpiexec|srun|ompi_info|mpichversion|hipconfig|git"
            r"|ssh|numactl)'",
            title="the program {path} is not installed on this machine, or not on PATH",
            fix="install the package of the system that holds it, or put its folder on PATH; slim images leave out hostname, "
            "ip, lsof and their like",
            steps=(step("command -v {path}"), step("echo $PATH")),
            sample='  File "/usr/lib/python3.10/subprocess.py", line 1863, in _execute_child\n'
            "FileNotFoundError: [Errno 2] No such file or directory: 'hostname'",
        ),
        Signature(
            words="filenotfounderror+data parent+directory+exist",
            pattern=r"^(?:FileNotFoundError: Couldn't find any data file at|RuntimeError: Parent directory) (?P<path>\S{1,200}?)"
            r"(?: does not exist\.?|\.? |\.?$)",
            tier=Tier.GENERIC,
            sample="RuntimeError: Parent directory /data/out does not exist.",
        ),
        Signature(
            words="filenotfounderror",
            pattern=r"^FileNotFoundError: (?:\[Errno 2\] |\[WinError [23]\] )?(?:No such file or directory|The system "
            r"cannot find the "
            r"(?:file|path) specified): b?'(?P<path>(?![^']{0,200}(?:_optim_states|_model_states|expert_\d|mp_rank_|/n"
            r"vcc|\\nvcc))"
            r"[^']{1,200})'(?! -> )",
            unless=r"'(?:\./)?(?:requirements/[\w.-]+|version\.txt|README\.md)'|numactl|'(?:c\+\+|g\+\+|gcc|ninja|nvcc"
            r"|cl|which|pdsh"
            r"|mpirun|mpiexec|srun|ompi_info|mpichversion|hipconfig|git|ssh)'|torch_extensions|/bin/nvcc",
            not_after=r"swap_folder|swap_tensor|nvme",
            tier=Tier.GENERIC,
            sample="FileNotFoundError: [Errno 2] No such file or directory: 'data/train.json'",
        ),
    ),
)

PERMISSION_MISSING = Rule(
    id="permission-missing",
    stage=Stage.RUN,
    title="this user may not read or write {path}",
    fix="give the user the right, or move what is written there: HF_HOME, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR "
    "and "
    "TORCH_EXTENSIONS_DIR for caches, --output_dir for results. In a container HOME is often / or belongs to another "
    "user: set HOME to a "
    "folder that is writable",
    steps=(step("ls -ld {path}"), step("id"), step("export HOME=/tmp HF_HOME=/tmp/hf TRITON_CACHE_DIR=/tmp/triton")),
    explained_by=("torch-extensions-permission", "pip-permission"),
    manual="""The system refused a process a file or folder: it belongs to another user, or its folder may not be
written.

Files that root made in a container, a HOME that does not exist, and shared caches of a colleague are the usual
reasons.

Why it matters: The rank ends; the others report a broken connection or wait.""",
    signatures=(
        Signature(
            words="permissionerror+errno+13 permissionerror+errno+1 permissionerror+winerror",
            pattern=r"^PermissionError: \[(?:Errno (?:13|1)|WinError (?:5|32))\] (?P<why>[^:]{1,80}): "
            r"b?['\"](?P<path>[^'\"]{1,200})['\"]",
            unless=r"torch_extensions|site-packages|dist-packages|/\.cache['\"]",
            not_after=r"_get_build_directory|file_baton|_jit_compile|_write_ninja_file|jit_load|torch/_appdirs",
            tier=Tier.GENERIC,
            title="this user may not read or write {path} (permission)",
            sample="PermissionError: [Errno 13] Permission denied: '/output/run1'",
        ),
    ),
)

FILE_SYSTEM_FAILS = Rule(
    id="file-system-fails",
    stage=Stage.RUN,
    title="the file system failed, not the program: {why}{path_hint}",
    fix="see what the kernel says of that disk or mount; mount the network disk (NFS, FUSE) again, write to a local "
    "disk and copy afterwards, and "
    "let only one process write a file",
    steps=(step("dmesg -T | tail -50"), step("df -h"), step("mount")),
    manual="""The system could not read or write a file.

A network disk that is gone or was exchanged, a broken disk, or a mount that does not have what was asked of it.

Why it matters: What was being written is lost, and the rank ends.""",
    signatures=(
        Signature(
            words="errno+5 errno+116 errno+121 errno+107 errno+117 errno+19 errno+37",
            pattern=r"^(?:OS|IO|FileNotFound)Error: \[Errno (?:5|116|121|107|117|19|37)\] (?P<why>[\w/ ]{4,60}?)(?:: "
            r"b?'(?P<path>[^']{1,200})'|$)",
            unless=r"torch_extensions",
            sample="OSError: [Errno 116] Stale file handle: '/mnt/nfs/ckpt/global_step10'",
        ),
        Signature(
            words="safetensorerror+serializing",
            pattern=r"SafetensorError: Error while serializing: (?:I/O error: |IoError\(Os \{ code: \d{1,3}, kind: "
            r")(?P<why>(?!StorageFull)[\w ]{3,60})",
            unless=r"No space left",
            title="a safetensors file could not be written: {why}; most often the network disk does not take such "
            "writes, or is full",
            sample="safetensors._safetensors_rust.SafetensorError: Error while serializing: I/O error: Invalid "
            "argument (os error 22)",
        ),
    ),
)

RULES = (FILE_MISSING, PERMISSION_MISSING, FILE_SYSTEM_FAILS)
