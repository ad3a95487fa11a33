"""Rules of installing: what pip, setuptools and DeepSpeed's setup.py print before anything is compiled."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

IN_A_BUILD = (
    r"setup\.py|egg_info|build_meta|metadata|pip-(?:install|req-build|build-env|modern)|build_wheel|build_editable"
    r"|Getting requirements|pyproject_hooks|pep517|builds-v0|op_builder[/\\]"
)

TORCH_MISSING_AT_BUILD = Rule(
    id="torch-missing-at-build",
    stage=Stage.INSTALL,
    title="DeepSpeed's setup.py cannot import torch: it is not installed, or pip's build isolation hides it",
    fix="install torch first, then build without isolation; dsdoctor does both right",
    steps=(step("python -m dsdoctor prebuild"), instead("python -m pip install --no-build-isolation deepspeed")),
    manual="""DeepSpeed's setup.py imports torch, and torch cannot be imported during the build.

setup.py declares no build dependency on torch, and those of flash-attn, apex or mamba-ssm do not
either. pip (always since 25.3), uv and poetry build in an isolated environment where only setuptools is installed, so
a torch that is installed outside it is not seen. Without isolation, torch and the build tools must be installed first.

Why it matters: No op can be compiled before the installation, and the build stops even though torch is installed.""",
    signatures=(
        Signature(
            words="pre+compile pre+compiling",
            pattern=r"Unable to pre-compile (?:(?P<op>\w+), please first install torch|ops without torch)",
            sample="AssertionError: Unable to pre-compile ops without torch installed. Please install torch "
            "before attempting "
            "to pre-compile ops.",
        ),
        Signature(
            words="torch+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?\"?torch'?\"?\s*$",
            after=IN_A_BUILD,
            sample='  File "/tmp/pip-install-x1/deepspeed_1/setup.py", line 29, in <module>\n'
            "ModuleNotFoundError: No module named 'torch'",
        ),
        Signature(
            words="unable+pytorch",
            pattern=r"Error: Unable to import torch, please visit https://pytorch\.org",
            sample="ImportError: Unable to import torch, please visit https://pytorch.org/ to see how to "
            "properly install torch",
        ),
        Signature(
            words="declare",
            pattern=r"depends on .torch., but doesn.t declare it as a build dependency",
            sample="hint: This error likely indicates that `deepspeed@0.14.0` depends on `torch`, but doesn't "
            "declare it as a "
            "build dependency.",
        ),
        Signature(
            words="torch_major",
            pattern=r"NameError: name 'TORCH_MAJOR' is not defined",
            sample="NameError: name 'TORCH_MAJOR' is not defined",
        ),
        Signature(
            words="pre+compile pre+compiling",
            tier=Tier.PROBE,
            pattern=r"[Uu]nable to import torch, (?:please install it if you want to pre-compile|pre-compiling "
            r"ops will be)"
            r"|Please install torch if trying to pre-compile",
            sample="[WARNING] Unable to import torch, pre-compiling ops will be disabled. Please visit "
            "https://pytorch.org/",
        ),
    ),
)

WINDOWS_UNSUPPORTED_OP = Rule(
    id="windows-unsupported-op",
    stage=Stage.INSTALL,
    title="async_io and gds need Linux libraries that Windows does not have",
    fix="switch the ops off that Windows cannot have, and build the others",
    steps=(
        step(
            "set DS_BUILD_AIO=0& set DS_BUILD_GDS=0& python -m pip install --no-build-isolation deepspeed",
            note="Windows",
        ),
        instead("set DS_BUILD_OPS=0& python -m pip install --no-build-isolation deepspeed"),
    ),
    manual="""On Windows DeepSpeed compiles every op ahead of time by default, also those that Windows cannot have.

async_io needs libaio and gds needs cuFile; neither exists on Windows (it does in WSL2). The lines about aio.lib
and cufile.lib are probes and harmless if another error follows.

Why it matters: The installation stops at an op that can never be built there.""",
    signatures=(
        Signature(
            words="lnk1181 lnk1104",
            pattern=r"LNK1(?:181|104)\b.{0,120}?\b(?P<file>aio|cufile)\.lib",
            tier=Tier.PROBE,
            op="async_io",
            title="the linker of Windows has no {file}.lib: async_io and gds cannot be built there",
            sample="LINK : fatal error LNK1181: cannot open input file 'aio.lib'",
        ),
        Signature(
            words="c1083",
            pattern=r"C1083\b.{0,120}?\b(?P<file>libaio\.h|unistd\.h|sys/mman\.h|numaif\.h|immintrin_linux\.h)",
            tier=Tier.FILE,
            title="MSVC has no {file}: this op is for Linux only",
            sample="csrc\\aio\\common\\deepspeed_aio_utils.h(8): fatal error C1083: Cannot open include file: "
            "'libaio.h': "
            "No such file or directory",
        ),
        Signature(
            words="posix",
            pattern=r"\b(?P<op>\w{1,100}) is only supported on POSIX platforms, not Windows",
            tier=Tier.PROBE,
            title="{op} is for POSIX systems, this is Windows",
            sample="[WARNING]  pin_memory is only supported on POSIX platforms, not Windows.",
        ),
    ),
)

WINDOWS_SYMLINK_PRIVILEGE = Rule(
    id="windows-symlink-privilege",
    stage=Stage.INSTALL,
    title="setup.py makes symbolic links, and this Windows account may not",
    fix="switch developer mode on (Settings, For developers) or build in an administrator's prompt, in a fresh "
    "source folder",
    manual="""DeepSpeed's setup.py makes symbolic links, and this Windows account is not allowed to make them.

Windows allows that only to administrators and to accounts in developer mode (WinError 1314). The folders are
deepspeed\\ops\\csrc, deepspeed\\ops\\op_builder and deepspeed\\accelerator of the source folder.

Why it matters: The build stops, and the half-made copies that it leaves in those folders make the next attempt
fail with WinError 183.""",
    signatures=(
        Signature(
            words="1314 privilege winerror+183 errno+17",
            pattern=r"WinError 1314\b|symbolic link privilege not held|required privilege is not held by the client"
            r"|FileExistsError: \[(?:WinError 183|Errno "
            r"17)\].{0,200}(?:csrc|op_builder|accelerator|deepspeed.{1,4}ops)",
            sample="OSError: [WinError 1314] A required privilege is not held by the client: '..\\\\..\\\\csrc' -> "
            "'.\\\\deepspeed\\\\ops\\\\csrc'",
        ),
    ),
)

OP_SILENTLY_SKIPPED = Rule(
    id="op-silently-skipped",
    stage=Stage.INSTALL,
    title="{op} was asked for, and the installation left it out without an error",
    fix="build it with dsdoctor, which names what is missing and fails where an op asked for is not in the wheel",
    steps=(step("python -m dsdoctor plan --ops {op}"), step("python -m dsdoctor prebuild --ops {op}")),
    manual="""An op was asked for, its prerequisite is missing, and setup.py left it out without an error.

That happens to async_io without libaio, to gds without libcufile and to evoformer_attn without CUTLASS, even with
DS_BUILD_<OP>=1. Only the line `Install Ops={...}` shows it: the op is False there.

Why it matters: The installation looks successful, and the op fails or is compiled again when the training starts.""",
    signatures=(
        Signature(
            words="skip+compile",
            pattern=r"Skip pre-compile of incompatible (?P<op>\w+)",
            tier=Tier.PROBE,
            sample="[WARNING]  Skip pre-compile of incompatible async_io; One can disable async_io with DS_BUILD_AIO=0",
        ),
    ),
)

DEEPSPEED_SETUP_BUG = Rule(
    id="deepspeed-setup-bug",
    stage=Stage.INSTALL,
    title="DeepSpeed's own setup fails: {error}",
    fix="take another release of DeepSpeed, or the source at a tag",
    steps=(
        step("python -m dsdoctor build-wheel --source newest"),
        instead("python -m pip install --no-build-isolation -U deepspeed"),
    ),
    manual="""This release of DeepSpeed cannot be installed, whatever the environment.

A file is missing from the source archive (op_builder, requirements, version.txt), or setup.py itself has a bug. A
source folder that was copied in part or built before shows the same errors.

Why it matters: No change to torch, CUDA or the compiler helps, so looking there is lost time.""",
    signatures=(
        Signature(
            words="copy+doesn",
            pattern=r"can't copy '(?P<error>deepspeed[/\\](?:accelerator|ops[/\\](?:csrc|op_builder)))': doesn't exist or not a "
            r"regular file",
            title="setuptools cannot copy {error}: in DeepSpeed's source that is a link to a folder beside it, and it was taken "
            "for a file",
            fix="remove the link and copy the folder there instead (cp -a csrc deepspeed/ops/csrc; the same for op_builder and "
            "accelerator), or take the released archive. Links get lost in a copy, in a zip, on Windows, or by a build of another "
            "user: remove build/ and deepspeed.egg-info then",
            steps=(step("ls -l {error}"), instead("python -m dsdoctor build-wheel --source newest")),
            sample="error: can't copy 'deepspeed/ops/csrc': doesn't exist or not a regular file",
        ),
        Signature(
            words="op_builder+named copy+doesn directory+requirements directory+version directory+readme",
            pattern=r"(?P<error>No module named 'op_builder'|can't copy "
            r"'(?!deepspeed[/\\](?:accelerator|ops[/\\](?:csrc|op_builder))')"
            r"[^']{1,120}': doesn't exist or not a "
            r"regular file"
            r"|No such file or directory: '(?:\./)?(?:requirements/[\w.-]+|version\.txt|README\.md)')",
            sample="ModuleNotFoundError: No module named 'op_builder'",
        ),
        Signature(
            words="recursionerror",
            pattern=r"(?P<error>RecursionError: maximum recursion depth exceeded)",
            after=r"real_accelerator|op_builder|deepspeed[/\\]",
            tier=Tier.GENERIC,
            sample='  File "/src/deepspeed-0.12.6/deepspeed/accelerator/real_accelerator.py", line 59, in '
            "get_accelerator\n"
            "RecursionError: maximum recursion depth exceeded",
        ),
        Signature(
            words="invalidversion",
            pattern=r"(?P<error>InvalidVersion: Invalid version: \S{1,160})",
            tier=Tier.GENERIC,
            sample="packaging.version.InvalidVersion: Invalid version: '0.9.0+unknown+foo'",
        ),
        Signature(
            words="nameerror unboundlocalerror attributeerror typeerror keyerror syntaxerror",
            pattern=r"(?P<error>(?:Name|UnboundLocal|Attribute|Type|Key|Syntax)Error: .{1,160})",
            after=r"(?:deepspeed|DeepSpeed|DeepSpeed-\S{1,20}|pip-\S{1,60})[/\\](?:setup\.py"
            r"|op_builder[/\\]\w+\.py)\", line",
            unless=r"NoneType|TORCH_MAJOR|CUDA_HOME|CUTLASS|'torch|has no attribute 'cuda|PyTorch",
            tier=Tier.GENERIC,
            sample='  File "/tmp/pip-install-x1/deepspeed_1/setup.py", line 139, in <module>\n'
            "UnboundLocalError: local variable 'env_var' referenced before assignment",
        ),
    ),
)

WHICH_DEVICES = step(
    'python -c "from deepspeed.accelerator import get_accelerator as get; print(get()._name, get().device_count())"'
)
"""Prints which accelerator DeepSpeed takes here, and how many devices it counts."""

ACCELERATOR_AUTODETECT_CPU = Rule(
    id="accelerator-autodetect-cpu",
    stage=Stage.INSTALL,
    title="no GPU is visible, so DeepSpeed chose the CPU accelerator",
    fix="set the accelerator that you build for; make the GPUs visible where it runs",
    steps=(step("export DS_ACCELERATOR=cuda"), instead("python -m dsdoctor prebuild --accelerator cuda")),
    explained_by=("cuda-not-initialized", "driver-too-old", "driver-silent"),
    manual="""DeepSpeed saw no GPU while it was built or imported, and chose the CPU accelerator.

Without DS_ACCELERATOR it looks for a GPU. In a docker build, on a login node or with a broken driver there is
none.

Why it matters: The CPU variants of the ops are built and the CUDA ops are refused. On a GPU machine DeepSpeed
ignores such ops later.""",
    signatures=(
        Signature(
            words="op+implemented notimplementedbuilder",
            pattern=r"This op had not been implemented on CPU backend|Error: .{0,40}NotImplementedBuilder",
            sample="ValueError: This op had not been implemented on CPU backend.",
        ),
        Signature(
            words="gpu+proceed",
            pattern=r"Unable to proceed, no GPU resources available",
            title="the launcher sees no GPU",
            tier=Tier.GENERIC,
            fix="make the GPUs visible (nvidia-smi, --gpus all, CUDA_VISIBLE_DEVICES). Where they are not NVIDIA's, DeepSpeed sees "
            "them only with the torch extension of their maker in this environment. --num_gpus makes none; to train on the CPU set "
            "DS_ACCELERATOR=cpu",
            steps=(step("nvidia-smi"), WHICH_DEVICES, step("python -m dsdoctor look")),
            sample="RuntimeError: Unable to proceed, no GPU resources available",
        ),
        Signature(
            words="ds_accelerator setting+accelerator",
            pattern=r"Setting ds_accelerator to cpu \(auto detect\)|Setting accelerator to CPU\. If you have GPU",
            tier=Tier.PROBE,
            sample="[INFO] [real_accelerator.py:203:get_accelerator] Setting ds_accelerator to cpu (auto detect)",
        ),
    ),
)

DISK_FULL = Rule(
    id="disk-full",
    stage=Stage.INSTALL,
    title="no space left on the disk",
    fix="make room, or move the temporary folder, pip's cache and the op cache to a disk with room (a build "
    "takes 5 to 10 GB)",
    steps=(
        step("df -h . /tmp ~"),
        step("export TMPDIR=/path/with/room TORCH_EXTENSIONS_DIR=/path/with/room/torch_extensions"),
    ),
    manual="""The compiler, pip or the run-time compilation wrote to a full file system.

Often it is /tmp or a tmpfs, sometimes a quota on the home folder. `df -h` and `df -i` show which.

Why it matters: It appears as an assembler or linker error with thousands of lines after it, so it is easily taken
for a compiler problem.""",
    signatures=(
        Signature(
            words="space+left space+enough enospc errno+28 espace espacio 磁盘空间不足 设备上没有空间 "
            "デバイスに空き領域がありません "
            "устройстве speicherplatz",
            pattern=r"No space left on device|\[?\bErrno 28\]?|\bENOSPC\b|[Nn]ot enough (?:disk )?space"
            r"|磁盘空间不足|设备上没有空间|デバイスに空き領域がありません|не осталось свободного места|[Kk]ein Speicherplatz mehr"
            r"|Aucun espace disponible sur|No queda espacio en",
            unless=r"/dev/shm|posix_fallocate|shm\.|NCCL|shared memory|Setup|nccl|unable to mmap|torch_\d+_",
            tier=Tier.FILE,
            sample="/tmp/ccx1.s: Fatal error: can't write 12 bytes to section .text of /tmp/x.o: No space left "
            "on device",
        ),
        Signature(
            words="quota errno+122",
            pattern=r"Disk quota exceeded|\[Errno 122\]",
            unless=r"/dev/shm|posix_fallocate|shm\.|NCCL|shared memory",
            tier=Tier.FILE,
            title="the disk quota of this user or project is used up",
            fix="delete what is no longer needed (caches, old checkpoints), ask for a larger quota, or move caches and "
            "output to another disk (HF_HOME, TORCH_EXTENSIONS_DIR, TRITON_CACHE_DIR, TMPDIR, PIP_CACHE_DIR): df -h shows "
            "room though the quota is full",
            steps=(step("quota -s"), step("du -sh ~/.cache/* | sort -h | tail")),
            sample="OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache/huggingface/hub'",
        ),
    ),
)

RULES = (
    TORCH_MISSING_AT_BUILD,
    WINDOWS_UNSUPPORTED_OP,
    WINDOWS_SYMLINK_PRIVILEGE,
    OP_SILENTLY_SKIPPED,
    DEEPSPEED_SETUP_BUG,
    ACCELERATOR_AUTODETECT_CPU,
    DISK_FULL,
)
