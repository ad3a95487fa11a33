"""Rules of compiling at run time: ninja, the cache of torch_extensions, consequences of a failed compile."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

MASKED_JIT_FAILURE = Rule(
    id="masked-jit-failure",
    stage=Stage.JIT,
    title="this log only shows consequences: {op|an op} failed to build, and the compiler's own error is not in it",
    fix="show the first error with one compiler at a time and an empty cache, then diagnose that log",
    manual="""The log only repeats that a compile failed; the compiler's own error is not in it.

`ninja: build stopped`, `ds_opt_adam`, a `.so` that cannot be opened and `returned non-zero exit status` are such
lines. The compiler's own line is hundreds of lines further up, or in the output of another rank. Compiled once by
itself, in one process, with all output kept, the op shows it.

Why it matters: The cause cannot be known from this log, and advice for the repeated lines (other packages, other
paths) leads astray.""",
    signatures=(
        Signature(
            words="ds_opt_adam adam_update destroy_adam create_adam",
            pattern=r"'(?P<object>\w*Adam\w*|NoneType)' object has no attribute '(?:ds_opt_adam\w*|adam_update"
            r"|destroy_adam|create_adam|opt_id)'",
            tier=Tier.ECHO,
            op="cpu_adam",
            title="DeepSpeedCPUAdam was never made: cpu_adam had failed before",
            sample="AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
        ),
        Signature(
            words="so+cannot so+kann so+se 无法打开共享对象文件 so+pyd",
            pattern=r"[/\\](?P<op>[A-Za-z]\w{0,60}?)(?:_v\d{1,4})?[/\\](?P=op)(?:_v\d+)?\.(?:so|pyd): "
            r".{0,12}(?:cannot open shared object|[^\s\x00-\x7f]|kann |no se puede)",
            tier=Tier.ECHO,
            title="{op}.so was never built: another rank's compile failed",
            sample="ImportError: /root/.cache/torch_extensions/py310_cu118/cpu_adam/cpu_adam.so: cannot open "
            "shared object file: No such file "
            "or directory",
        ),
        Signature(
            words="building+extension",
            pattern=r"Error building extension '(?P<op>\w+?)(?:_v\d+)?'",
            tier=Tier.ECHO,
            sample="RuntimeError: Error building extension 'cpu_adam'",
        ),
        Signature(
            words="ninja",
            pattern=r"ninja: build stopped|\['ninja', .{0,30}\]' returned non-zero",
            tier=Tier.ECHO,
            sample="ninja: build stopped: subcommand failed.",
        ),
        Signature(
            words="compiling+objects",
            pattern=r"Error compiling objects for extension",
            tier=Tier.ECHO,
            sample="RuntimeError: Error compiling objects for extension",
        ),
        Signature(
            words="load+compatible",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>\w+) op due to it not being compatible",
            unless=r"async_io|evoformer_attn|the gds |software issue\.? {1,4}(?!None\b)\w.{5}",
            tier=Tier.ECHO,
            title="DeepSpeed refuses to compile {op} here and does not say why",
            sample="RuntimeError: Unable to JIT load the fused_adam op due to it not being compatible due to "
            "hardware/software issue. None",
        ),
        Signature(
            words="unable+compile",
            pattern=r"Unable to pre-compile (?P<op>(?!ops\b)\w+)\s*$",
            tier=Tier.ECHO,
            sample="AssertionError: Unable to pre-compile spatial_inference",
        ),
        Signature(
            words="modulenotfounderror importerror+import",
            pattern=r"No module named '?(?:deepspeed\.ops\.(?:\w{1,60}\.){0,6}_{0,2}|)(?P<op>[a-z]\w{0,100}?)_op'?\s*$"
            r"|cannot import name '(?P<op2>\w+?)_op'",
            tier=Tier.ECHO,
            title="the built op {op} is not in this installation",
            sample="ModuleNotFoundError: No module named 'deepspeed.ops.adam.cpu_adam_op'",
        ),
        Signature(
            words="exits childfailederror exitcode exited+code code+zero status+zero segmentation aborted code+134 "
            "code+139 sigsegv sigabrt",
            pattern=r"(?:exits with return code =|exitcode\s{0,20}:) (?!-[479]\b)-?[1-9]|ChildFailedError"
            r"|Exited with exit code [1-9]"
            r"|non-zero code: [1-9]|exited with non-zero status|^a non-zero exit code|Segmentation fault|^Aborted\b"
            r"|\sAborted\s|exit (?:code|status):? 13[49]\b|SIGSEGV|SIGABRT",
            tier=Tier.EXIT,
            title="a process crashed or ended with an error, and its own message is not in this log",
            sample="[ERROR] [launch.py:259:sigkill_handler] ['/venv/bin/python', '-u', 'train.py'] exits with "
            "return code = 1",
        ),
        Signature(
            words="main+process+received",
            pattern=r"Main process received SIG(?:TERM|INT|HUP)",
            tier=Tier.EXIT,
            title="the job was ended from outside, and this log does not say what it waited for",
            sample="[INFO] [launch.py:262:sigkill_handler] Main process received SIGTERM, exiting",
        ),
        Signature(
            words="failed+wheel failed+build subprocess metadata+generation did+run could+wheels",
            pattern=r"Failed (?:building wheel|to build(?: installable wheels)?) (?:for )?[`']?deepspeed"
            r"|subprocess-exited-with-error|metadata-generation-failed"
            r"|(?:setup\.py|egg_info|wheel|metadata)\b.{0,40} did not run successfully|Failed to (?:download and "
            r")?build [`']?deepspeed"
            r"|Could not build wheels for deepspeed",
            tier=Tier.EXIT,
            title="this log only has pip's last lines, not the error of DeepSpeed's setup.py",
            sample="ERROR: Failed building wheel for deepspeed",
        ),
        Signature(
            words="command+failed collect2",
            pattern=r"error: command '.{0,200}' failed with exit (?:status|code) (?!137|-9)\d+|collect2: error: "
            r"ld returned",
            tier=Tier.EXIT,
            title="a compiler failed, and its error is not in this log",
            sample="error: command '/usr/bin/x86_64-linux-gnu-g++' failed with exit code 1",
        ),
    ),
)

OP_NOT_COMPATIBLE = Rule(
    id="op-not-compatible",
    stage=Stage.JIT,
    title="{op} cannot be compiled here, in DeepSpeed's own words: {why}",
    fix="meet what it asks for, or take a feature that does not need {op}",
    steps=(step("python -m dsdoctor check --ops {op}"), step("python -m dsdoctor plan")),
    manual="""An op's own test says that it does not go with this machine, and DeepSpeed was asked to load it.

Each op has such a test: the GPU's generation, the release of CUDA, of torch, a library. Its words stand behind
"hardware/software issue". sparse_attn takes torch 1.5 to 1.13 only, and DeepSpeed has dropped it since.

Why it matters: Whatever asked for the op does not start, and no compiler was run.""",
    signatures=(
        Signature(
            words="sparse_attn",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>sparse_attn) op due to it not being compatible.{1,60}? issue\.? "
            r"{1,4}(?P<why>sparse_attn requires a torch version.{1,80})",
            title="sparse_attn does not go with this torch: {why}",
            fix="sparse_attn is for torch 1.5 to 1.13: leave sparse attention out (its key in the configuration, its flag of the "
            "script), and take the attention of torch (SDPA) or flash-attn; or use an old torch with an old DeepSpeed",
            steps=(step("python -c 'import torch, deepspeed; print(torch.__version__, deepspeed.__version__)'"),),
            sample="RuntimeError: Unable to JIT load the sparse_attn op due to it not being compatible due to hardware/software "
            "issue. sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.0",
        ),
        Signature(
            words="sparse_attn",
            pattern=r"^\S{0,12} {0,4}sparse_attn (?P<why>requires a torch version .{1,40} but detected \S{1,12})",
            tier=Tier.PROBE,
            op="sparse_attn",
            title="sparse_attn does not go with this torch: it {why}",
            fix="sparse_attn is for torch 1.5 to 1.13: leave sparse attention out, and take the attention of torch (SDPA) or "
            "flash-attn; where nothing uses it, the line is harmless",
            sample="[WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.0",
        ),
        Signature(
            words="load+compatible",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>(?!async_io|evoformer_attn|gds\b|sparse_attn)\w+) op due to it "
            r"not being compatible.{1,60}? issue\.? {1,4}(?P<why>(?!None\b)\w.{5,200})",
            unless=r"only supported on",
            sample="RuntimeError: Unable to JIT load the inference_core_ops op due to it not being compatible due to "
            "hardware/software issue. On Ampere and higher architectures please use CUDA 11+",
        ),
    ),
)

NINJA_MISSING = Rule(
    id="ninja-missing",
    stage=Stage.JIT,
    title="ninja cannot be run here: torch needs it to compile at run time",
    fix="install ninja into this environment, and put the environment's bin folder on PATH of every process and node",
    steps=(
        step("python -m pip install ninja"),
        step('export PATH="$(dirname "$(which python)"):$PATH"'),
        step("ninja --version"),
    ),
    manual="""torch compiles ops at run time by running the program ninja, and it was not found.

The Python package may be there all the same: PATH of the job, of sudo, of the notebook or of the other node lacks
the environment's bin folder.

Why it matters: No op can be compiled at run time. A wheel with the ops inside (`python -m dsdoctor prebuild`)
needs no ninja.""",
    signatures=(
        Signature(
            words="ninja",
            pattern=r"Ninja is required to load C\+\+ extensions|due to ninja not being installed|No such file "
            r"or directory: '?\"?ninja"
            r"|No module named '?ninja|ninja: (?:command )?not found|command not found: ninja|ninja is required "
            r"to build"
            r"|Command '\['ninja', '--version'\]' returned",
            sample="RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        ),
        Signature(
            words="ninja",
            pattern=r"(?:we could not find|could not find) ninja",
            tier=Tier.PROBE,
            title="ninja is not here: setuptools builds without it, slowly",
            sample="UserWarning: Attempted to use ninja as the BuildExtension backend but we could not find "
            "ninja.. Falling back to using the "
            "slow distutils backend.",
        ),
    ),
)

TORCH_EXTENSIONS_PERMISSION = Rule(
    id="torch-extensions-permission",
    stage=Stage.JIT,
    title="the cache of compiled ops, {path|the folder of torch_extensions}, cannot be written",
    fix="give the cache a folder that this user may write",
    steps=(
        step('export TORCH_EXTENSIONS_DIR="$HOME/torch_extensions"'),
        step("ls -ld {path|~/.cache/torch_extensions}"),
    ),
    manual="""The folder where torch keeps ops compiled at run time cannot be written.

By default it is ~/.cache/torch_extensions. It was made by root once (sudo, docker), is on a read-only home, or is
/.cache because HOME is not set. TORCH_EXTENSIONS_DIR names another one; each environment should have its own.

Why it matters: No op can be compiled at run time.""",
    signatures=(
        Signature(
            words="permissionerror permission+denied read+system operation+permitted",
            pattern=r"(?:Permission denied|Read-only file system|Operation not permitted):? ?.?['\"‘]?"
            r"(?P<path>[^'\"\s]{0,200}(?:torch_extensions|/\.cache(?=['\"\s]|/?$))[^'\"\s]{0,120})",
            sample="PermissionError: [Errno 13] Permission denied: '/root/.cache/torch_extensions/py310_cu118'",
        ),
        Signature(
            words="errno+13 errno+30 winerror+5",
            pattern=r"\[(?:Errno (?:13|30)|WinError "
            r"5)\][^/'\"]{0,80}['\"](?P<path>[^'\"]{0,200}(?:torch_extensions|[/\\]\.cache(?=['\"]))[^'\"]{0,120})",
            sample="PermissionError: [Errno 13] Keine Berechtigung: '/shared/torch_extensions/py311_cu130/utils/lock'",
        ),
        Signature(
            words="permissionerror oserror",
            pattern=r"(?:PermissionError|OSError): \[Errno (?:13|30)\] .{1,60}: '(?P<path>[^']{1,200})'",
            after=r"_get_build_directory|file_baton|_jit_compile|_write_ninja_file|jit_load|torch/_appdirs",
            unless=r"torch_extensions|/\.cache|nvcc",
            sample='  File "/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2827, in '
            "_get_build_directory\n"
            "PermissionError: [Errno 13] Permission denied: '/shared/ops/cpu_adam'",
        ),
        Signature(
            words="filenotfounderror",
            pattern=r"FileNotFoundError: .{1,60}: '(?P<path>[^']{0,200}torch_extensions[^']{0,120})'",
            unless=r"\.so'|/lock'|\.pyd'|nvcc",
            tier=Tier.GENERIC,
            title="the folder of compiled ops, {path}, is not there and could not be made",
            sample="FileNotFoundError: [Errno 2] No such file or directory: "
            "'/nonexistent/.cache/torch_extensions/py310_cu121'",
        ),
        Signature(
            words="ninja+opening torch_extensions+denied",
            pattern=r"ninja: error: opening build log: Permission denied"
            r"|(?<!\S)(?P<path>\S{0,300}torch_extensions\S{0,160}): Permission denied",
            sample="ninja: error: opening build log: Permission denied",
        ),
    ),
)

STALE_JIT_CACHE = Rule(
    id="stale-jit-cache",
    stage=Stage.JIT,
    title="the cache of compiled ops{cache_hint} holds what another process or environment left",
    fix="end leftover processes, remove the cache, and give every environment one of its own",
    steps=(
        step("mv {cache|~/.cache/torch_extensions} {cache_aside|~/.cache/torch_extensions.old}"),
        instead('export TORCH_EXTENSIONS_DIR="$VIRTUAL_ENV/torch_extensions"'),
    ),
    manual="""The cache of ops compiled at run time holds files that another process or environment left.

~/.cache/torch_extensions is shared by all environments of a Python and CUDA release. A process killed while
compiling leaves a file `lock` there. A wheel with the ops inside (`python -m dsdoctor prebuild`) needs no cache.

Why it matters: With torch up to 2.13 every later start waits for the lock for ever and prints nothing. Libraries
of another Python, torch or machine are loaded and fail.""",
    signatures=(
        Signature(
            words="module+compiled module+define",
            pattern=r"Python version mismatch: module was compiled for|does not define module export function",
            title="the cached library is of another Python",
            sample="ImportError: Python version mismatch: module was compiled for Python 3.8, but the "
            "interpreter version is incompatible: 3.10",
        ),
        Signature(
            words="torch_extensions",
            pattern=r"(?<![^\s~,:=\"\'(])(?P<cache>/[^\s~,:=\"\'(]{0,200}torch_extensions/[\w./-]{0,200})/\w{1,100}/\w{1,100}\.so: "
            r"(?:file too short|invalid ELF "
            r"header|wrong ELF class|undefined symbol: _?Py\w+)",
            title="the cached library is broken, or of another machine or Python",
            sample="ImportError: /home/u/.cache/torch_extensions/py310_cu121/utils/utils.so: file too short",
        ),
        Signature(
            words="waited+lock",
            pattern=r"Waited on lock file \"(?P<file>[^\"]{1,300})\" for (?P<seconds>\d+) seconds",
            tier=Tier.PROBE,
            title="a process waited {seconds} seconds for the lock {file}",
            sample='UserWarning: Waited on lock file "/root/.cache/torch_extensions/py311_cu130/cpu_adam/lock" '
            "for 300 seconds.",
        ),
        Signature(
            words="baton file_baton",
            pattern=r"baton\.wait\(\)|file_baton\.py\"?, line \d+,? in wait",
            title="the process waits for the lock of a cached op, which nobody holds any more",
            tier=Tier.GENERIC,
            sample='  File "/venv/lib/python3.10/site-packages/torch/utils/file_baton.py", line 43, in wait',
        ),
        Signature(
            words="ninja",
            pattern=r"ninja: error: '(?P<file>[^']{1,200})', needed by '[^']{1,200}', missing and no known rule"
            r"|ninja: error: build\.ninja:\d+:"
            r"|ninja: error: (?:build log version|loading 'build\.ninja')",
            tier=Tier.FILE,
            title="the cached build.ninja names files that are gone{file_hint}",
            sample="ninja: error: '/old/venv/lib/python3.9/site-packages/deepspeed/ops/csrc/adam/cpu_adam.cpp', "
            "needed by 'cpu_adam.o', missing "
            "and no known rule to make it",
        ),
        Signature(
            words="116 stale",
            pattern=r"(?:Stale (?:NFS )?file handle|Errno 116).{0,200}torch_extensions",
            title="the cache is on a network file system and was removed meanwhile",
            sample="OSError: [Errno 116] Stale file handle: '/nfs/u/.cache/torch_extensions/py310_cu121/utils/lock'",
        ),
    ),
)

RULES = (MASKED_JIT_FAILURE, OP_NOT_COMPATIBLE, NINJA_MISSING, TORCH_EXTENSIONS_PERMISSION, STALE_JIT_CACHE)
