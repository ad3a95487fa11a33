"""Rules of the CUDA toolkit: missing, of another release than torch's, or an unusable folder."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PROBED = r"compatibility check failed|treating the op as not compatible"
ACCEPTED = r"but since|accepting this combination|Allowing this combination|DS_SKIP_CUDA_CHECK=1"

CUDA_TOOLKIT_MISSING = Rule(
    id="cuda-toolkit-missing",
    stage=Stage.INSTALL,
    title="no CUDA toolkit was found: CUDA_HOME is unset and there is no nvcc",
    fix="give the build a toolkit of torch's CUDA release{cuda_hint}; dsdoctor assembles one without root",
    steps=(step('export CUDA_HOME="$(python -m dsdoctor toolkit)"'), instead('eval "$(python -m dsdoctor env)"')),
    manual="""torch found no CUDA toolkit.

torch looks at CUDA_HOME, CUDA_PATH, nvcc on PATH and /usr/local/cuda. torch's wheels bring the CUDA runtime, not
the compiler, and a driver (nvidia-smi) is not a toolkit. `python -m dsdoctor toolkit` prints a toolkit that fits
torch, or assembles one from PyPI's packages (CUDA 13). conda (cuda-toolkit=<torch's release>, channel nvidia) and
NVIDIA's packages have toolkits too.

Why it matters: DeepSpeed's CUDA ops need nvcc and its headers: none of them can be compiled.""",
    signatures=(
        Signature(
            words="cuda_home missingcudaexception",
            pattern=r"CUDA_HOME environment variable is not set|(?:[Cc]annot|[Cc]ould not|[Uu]nable to) (?:find"
            r"|locate) CUDA_HOME|CUDA_HOME does not exist, unable to compile"
            r"|MissingCUDAException: (?!Unable to run)",
            unless=PROBED,
            sample="OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
        ),
        Signature(
            words="cuda+found+system",
            pattern=r"CUDA was not found on the system",
            sample="RuntimeError: CUDA was not found on the system, please set the CUDA_HOME or the "
            "CUDA_PATHenvironment variable or "
            "add NVCC to your system PATH. The extension compilation will fail.",
        ),
        Signature(
            words="nvcc+found nvcc+no nvcc+directory nvcc+befehl nvcc+kommando nvcc+orden nvcc+commande "
            "nvcc+recognized nvcc+inaccessible 未找到命令 コマンドが見つかりません команда",
            pattern=r"(?:^|[\s:'\"])nvcc['\"]?: (?:command not found|not found|No such file|inaccessible|Befehl "
            r"nicht gefunden"
            r"|Kommando nicht gefunden|no se encontr|orden no encontrada|commande introuvable|未找到命令|コマンドが見つかりません"
            r"|команда не найдена)|No such file or directory: '?\"?nvcc\b|'nvcc' is not recognized|"
            r"which: no nvcc in|command not found: nvcc$|[Cc]ommand 'nvcc' not found|The term 'nvcc' is not recognized",
            tier=Tier.FILE,
            sample="/bin/sh: 1: nvcc: not found",
        ),
        Signature(
            words="nonetype",
            pattern=r"unsupported operand type\(s\) for \+: 'NoneType' and 'str'|PathLike object, not NoneType",
            after=r"CUDA_HOME|cuda_home|bin/nvcc",
            title="CUDA_HOME is unset: the builder joined nothing with bin/nvcc",
            sample='    cuda_home + "/bin/nvcc", "-V"\n'
            "TypeError: unsupported operand type(s) for +: 'NoneType' and 'str'",
        ),
        Signature(
            words="cuda_home",
            pattern=r"\b(?P<op>\w{1,100}) compatibility check failed \(CUDA_HOME does not exist",
            tier=Tier.PROBE,
            title="no CUDA toolkit here: {op} was left out, which is harmless where no op is compiled",
            sample="[WARNING] fp_quantizer compatibility check failed (CUDA_HOME does not exist, unable to "
            "compile CUDA op(s)), "
            "treating the op as not compatible",
        ),
    ),
)

CUDA_TORCH_MISMATCH = Rule(
    id="cuda-torch-mismatch",
    stage=Stage.INSTALL,
    title="nvcc is CUDA {nvcc|another release}, torch was built with CUDA {cuda|another one}",
    fix="build with the toolkit of torch's own CUDA release; dsdoctor finds it among those that are here, or "
    "assembles it",
    steps=(step('eval "$(python -m dsdoctor env)"'), step("python -m dsdoctor prebuild")),
    manual="""The nvcc that the build found is of another CUDA release than the one torch was built with.

DeepSpeed refuses another major release (and for CUDA 13 another minor one), torch refuses another major one. The
release that nvidia-smi shows is the driver's and plays no part. Instead of another toolkit, a torch for the
toolkit you have also works (pip's --index-url .../cu126).

Why it matters: The build stops. DS_SKIP_CUDA_CHECK=1 only switches off DeepSpeed's own check, and is safe at most
across minor releases.""",
    signatures=(
        Signature(
            words="installed+cuda",
            pattern=r"Installed CUDA version (?P<nvcc>[\d.]+) does not match the version torch was compiled with "
            r"(?P<cuda>[\d.]{1,12}\d)",
            unless=ACCEPTED,
            sample="op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version "
            "12.1 does not match the "
            "version torch was compiled with 11.8, unable to compile cuda/cpp extensions without a matching cuda "
            "version.",
        ),
        Signature(
            words="detected+cuda",
            pattern=r"The detected CUDA version \((?P<nvcc>\d[\d.]*)\) mismatches the version that was used to "
            r"compile\s?"
            r"PyTorch \((?P<cuda>[\d.]+)\)",
            sample="RuntimeError: The detected CUDA version (11.4) mismatches the version that was used to "
            "compilePyTorch (12.1). "
            "Please make sure to use the same CUDA versions.",
        ),
        Signature(
            words="detected+cuda",
            pattern=r"The detected CUDA version \(%s\) mismatches .{0,200}?', '(?P<nvcc>[\d.]+)', '(?P<cuda>[\d.]+)'",
            sample="RuntimeError: ('The detected CUDA version (%s) mismatches the version that was used to "
            "compilePyTorch (%s). Please "
            "make sure to use the same CUDA versions.', '12.4', '13.0')",
        ),
        Signature(
            words="compiled+version+match",
            pattern=r"Cuda extensions are being compiled with a version of Cuda that does not match the version "
            r"used to compile "
            r"Pytorch(?:.{0,80}compiled with Cuda (?P<cuda>[\d.]*\d))?",
            sample="RuntimeError: Cuda extensions are being compiled with a version of Cuda that does not "
            "match the version used "
            "to compile Pytorch binaries.  Pytorch binaries were compiled with Cuda 11.7.",
        ),
        Signature(
            words="detected+cuda",
            pattern=r"The detected CUDA version \((?P<nvcc>\d[\d.]*)\) mismatches the version that was used to "
            r"compile$",
            title="nvcc is CUDA {nvcc}, and torch was built with another release",
            sample="The detected CUDA version (13.0) mismatches the version that was used to compile",
        ),
        Signature(
            words="cudamismatchexception",
            pattern=r"CUDAMismatchException\b",
            unless=r"raise|Installed CUDA version|^from|^import",
            tier=Tier.GENERIC,
            title="nvcc and torch are of different CUDA releases",
            sample="op_builder.builder.CUDAMismatchException",
        ),
        Signature(
            words="installed+cuda",
            pattern=r"Installed CUDA version (?P<nvcc>[\d.]+) does not match the version torch was compiled with "
            r"(?P<cuda>[\d.]{1,12}\d)"
            r".{0,80}(?:accepting this combination|Allowing this combination|DS_SKIP_CUDA_CHECK=1)",
            tier=Tier.PROBE,
            title="nvcc is CUDA {nvcc}, torch was built with {cuda}: accepted",
            sample="Installed CUDA version 11.7 does not match the version torch was compiled with 11.8 but "
            "since the APIs are "
            "compatible, accepting this combination",
        ),
    ),
)

CUDA_HOME_WRONG = Rule(
    id="cuda-home-wrong",
    stage=Stage.INSTALL,
    title="CUDA_HOME is {home}, and there is no usable toolkit in it",
    fix="point CUDA_HOME at one folder that holds bin/nvcc, include and lib64; dsdoctor knows which",
    steps=(step('export CUDA_HOME="$(python -m dsdoctor toolkit)"'), instead('eval "$(python -m dsdoctor env)"')),
    manual="""CUDA_HOME is set to, or was guessed as, a folder without a whole toolkit.

Only the runtime is there, the value is a list with colons or has quotes in it, or a wrapper nvcc in
/usr/local/bin makes torch guess /usr/local, whose include folder has no CUDA headers. `python -m dsdoctor look`
shows the CUDA_HOME that torch takes and what each toolkit here lacks.

Why it matters: torch never checks the folder, so the build fails later, at the first header or library that is
not there.""",
    signatures=(
        Signature(
            words="nvcc",
            pattern=r"nvcc(?:\.exe)? not found at '(?P<home>.{0,200}?)[/\\]bin[/\\]nvcc",
            sample="FileNotFoundError: nvcc not found at '/opt/cuda-runtime/bin/nvcc'. Ensure CUDA path "
            "'/opt/cuda-runtime' is correct.",
        ),
        Signature(
            words="nvcc",
            pattern=r"[Cc]ommand '(?:\[')?(?P<home3>[^'\s]{1,200}?)/bin/nvcc'(?: failed: |, .{0,40}exit status 12[67])"
            r"|(?:No such file or directory|Permission denied|Not a directory|Exec format error): '?\"?"
            r"(?P<home>[^'\"\s]{0,200}?)/bin/nvcc\b|Unable to run (?P<home2>\S{0,200}?)/bin/nvcc\b",
            unless=PROBED,
            sample="FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
        ),
        Signature(
            words="nvcc",
            pattern=r"(?:^|: |')(?P<home>[^\s']{0,200}?)[/\\]bin[/\\]nvcc(?:\.exe)?'?: (?:not found|No such file"
            r"|Permission denied|cannot execute"
            r"|Not a directory|Datei oder|没有那个|No existe|Aucun fichier|そのような)",
            tier=Tier.FILE,
            sample="/bin/sh: 1: :/usr/local/cuda/bin/nvcc: not found",
        ),
        Signature(
            words="winerror+2",
            pattern=r"FileNotFoundError: \[WinError 2\]",
            after=r"/bin/nvcc|installed_cuda_version",
            title="CUDA_HOME names a folder without bin\\nvcc.exe",
            sample='    output = subprocess.check_output([cuda_home + "/bin/nvcc", "-V"])\n'
            "FileNotFoundError: [WinError 2] The system cannot find the file specified",
        ),
        Signature(
            words="release+list+valueerror",
            pattern=r"ValueError: 'release' is not in list",
            title="the nvcc in CUDA_HOME does not answer like nvcc",
            sample="ValueError: 'release' is not in list",
        ),
        Signature(
            words="cicc cudafe ptxas fatbinary libdevice nvlink",
            pattern=r"(?:^|[\s:/])(?P<part>cicc|cudafe\+\+|ptxas|fatbinary|nvlink)'?: (?:command not found|not "
            r"found|No such file|Permission denied)"
            r"|Path to (?P<part2>libdevice) library not specified|Failed to find (?P<part3>cicc|ptxas)",
            tier=Tier.FILE,
            title="nvcc is there, but its part {part} is not: half a toolkit",
            sample="sh: 1: cicc: not found",
        ),
        Signature(
            words="cuda_home cuda_path",
            pattern=r"(?:CUDA_HOME|CUDA_PATH)=(?P<quote>'?)(?P<home>:[^\s']{1,200}|[^\s':]{1,100}:/[^\s']{1,200}"
            r"|\\?\"[^\s']{1,200})",
            unless=r"No CUDA runtime is found.{0,20}$|(?:CUDA_HOME|CUDA_PATH)=\\?[\"']?(?:\$|`)",
            tier=Tier.GENERIC,
            title="CUDA_HOME is {home}: a list or a quoted text, not a folder",
            sample="No CUDA runtime is found, using CUDA_HOME=':/usr/local/cuda-11.8'",
        ),
    ),
)

RULES = (CUDA_TOOLKIT_MISSING, CUDA_TORCH_MISMATCH, CUDA_HOME_WRONG)
