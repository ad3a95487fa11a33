"""Rules of pip that builds or installs other packages than DeepSpeed: compilers that they need, git, files of requirements."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PIP_COMPILER_MISSING = Rule(
    id="pip-compiler-missing",
    stage=Stage.INSTALL,
    title="a package has no wheel for this Python, so pip compiles it, and {compiler} is not here",
    fix="upgrade pip and take a Python (3.10 to 3.12) or a release of the package for which there is a wheel; or "
    "install the compiler",
    steps=(step("python -m pip install -U pip"), step("python --version")),
    manual="""pip found no file of the package that is compiled already, and its source needs a compiler of its own.

A Python that is too new or too old, or an old pip, is the usual reason; tokenizers and safetensors need Rust, others
Visual C++ on Windows.

Why it matters: The package is not installed, and nothing after it either.""",
    signatures=(
        Signature(
            words="rust+compiler rust+cargo",
            pattern=r"error: can't find (?P<compiler>Rust) compiler|(?P<compiler2>Cargo|Rust), the Rust package "
            r"manager, is not installed",
            steps=(
                step("python -m pip install -U pip"),
                instead("curl --proto '=https' -sSf https://sh.rustup.rs -o rustup.sh"),
            ),
            sample="error: can't find Rust compiler",
        ),
        Signature(
            words="compile+mpi",
            pattern=r"error: Cannot compile (?P<compiler>MPI) programs",
            title="mpi4py is compiled against {compiler}, and its compiler (mpicc, the development package) is not "
            "here",
            fix="install an MPI with its headers, or leave mpi4py out: DeepSpeed needs it only where ranks are "
            "started by mpirun",
            steps=(
                step("sudo apt install libopenmpi-dev openmpi-bin"),
                instead("conda install -c conda-forge mpi4py openmpi"),
            ),
            sample="error: Cannot compile MPI programs. Check your configuration!!!",
        ),
        Signature(
            words="flashattention+only+cuda",
            pattern=r"RuntimeError: FlashAttention is only supported on (?P<compiler>CUDA [\d.]{1,6}) and above",
            title="flash-attn is compiled, and nvcc is older than {compiler}, or is not found",
            fix="take a wheel of flash-attn that names this torch, CUDA and Python (its releases on GitHub); or point "
            "CUDA_HOME to a newer toolkit with nvcc",
            steps=(step("nvcc --version"), step("export CUDA_HOME=/usr/local/cuda-12.8")),
            sample="RuntimeError: FlashAttention is only supported on CUDA 11.7 and above.  Note: make sure nvcc has "
            "a supported version",
        ),
    ),
)

PIP_WHEEL_FAILED = Rule(
    id="pip-other-wheel-failed",
    stage=Stage.INSTALL,
    title="pip cannot build {package}; its own first error stands above this line, and DeepSpeed is not the cause",
    fix="look for the first `error:` above; a wheel that is compiled already avoids the build: another release of "
    "{package}, another Python, or the "
    "package of conda-forge",
    steps=(
        step("python -m pip install -v --only-binary :all: {package}"),
        step("python -m pip download --no-deps {package}"),
    ),
    explained_by=(
        "pip-compiler-missing",
        "host-compiler-missing",
        "cuda-toolkit-missing",
        "torch-missing-at-build",
        "python-headers-missing",
        "disk-full",
        "compiler-oom-killed",
        "python-dep-missing",
        "wheel-package-missing",
        "cuda-torch-mismatch",
        "pip-network",
        "git-unreachable",
    ),
    manual="""One of the packages to be installed was built from source, and its build failed.

Why it matters: pip installs none of the packages of that command.""",
    signatures=(
        Signature(
            words="failed+building+wheel",
            pattern=r"^ERROR: Failed building wheel for (?P<package>(?!deepspeed\b|DeepSpeed\b)[A-Za-z][\w.-]{0,60})",
            tier=Tier.GENERIC,
            sample="ERROR: Failed building wheel for mpi4py",
        ),
    ),
)

PIP_REQUIREMENTS_MISSING = Rule(
    id="pip-requirements-missing",
    stage=Stage.INSTALL,
    title="pip does not find {what}: it is called in another folder than that of the project",
    fix="change into the folder of the source (where setup.py or pyproject.toml and the requirements are), and call "
    "pip there",
    steps=(step("pwd"), step("ls")),
    manual="""pip was given a file of requirements, or a folder to install, that is not there.

Why it matters: Nothing is installed.""",
    signatures=(
        Signature(
            words="requirements+open+file",
            pattern=r"ERROR: Could not open requirements file: \[Errno 2\] No such file or directory: "
            r"'(?P<what>[^']{1,160})'",
            sample="ERROR: Could not open requirements file: [Errno 2] No such file or directory: 'requirements.txt'",
        ),
        Signature(
            words="installable+directory installable+setup",
            pattern=r"ERROR: (?P<what>.{0,60}(?:Directory '[^']{1,160}'|\S{1,160})) (?:is not installable|does not "
            r"appear to be a Python project)",
            title="this folder is no Python project, so pip cannot install it (no setup.py, no pyproject.toml): {what}",
            sample="ERROR: Directory '.' is not installable. Neither 'setup.py' nor 'pyproject.toml' found.",
        ),
        Signature(
            words="invalid+requirement",
            pattern=r"ERROR: Invalid requirement: (?P<what>(?!.{0,200}--(?:global|build|install)-option).{1,120})",
            title="pip cannot read this requirement: {what}",
            fix="write it as NAME==VERSION, in quotes where it has < or > (the shell takes them as redirections)",
            steps=(step("python -m pip install 'deepspeed>=0.15'"),),
            sample="ERROR: Invalid requirement: 'deepspeed=0.15'",
        ),
    ),
)

PIP_CANNOT_UNINSTALL = Rule(
    id="pip-cannot-uninstall",
    stage=Stage.INSTALL,
    title="pip cannot remove the old {package}: it was not installed by pip (but by distutils, the system or conda)",
    fix="use a virtual environment of your own, where nothing has to be removed; in a container --ignore-installed "
    "puts the new one before the old",
    steps=(
        step("python3 -m venv ~/venv"),
        instead("python -m pip install --ignore-installed {package}"),
    ),
    manual="""pip keeps no list of files of packages that others have installed, so it cannot take them away.

Why it matters: Nothing is installed.""",
    signatures=(
        Signature(
            words="cannot+uninstall",
            pattern=r"(?:ERROR: |error: )?Cannot uninstall '?(?P<package>[\w.-]{1,60}?)'?(?: "
            r"[\d.]{1,20}\w{0,10})?[.,] ",
            sample="ERROR: Cannot uninstall 'PyYAML'. It is a distutils installed project and thus we cannot "
            "accurately determine which files "
            "belong to it which would lead to only a partial uninstall.",
        ),
    ),
)

GIT_UNREACHABLE = Rule(
    id="git-unreachable",
    stage=Stage.INSTALL,
    title="git does not get the source from {host}: {why}",
    fix="fetch it where there is a network (or with the site's proxy: git config --global http.proxy), and install "
    "from that folder; for released versions no "
    "git is needed: pip install NAME==VERSION",
    steps=(step("git ls-remote https://github.com/deepspeedai/DeepSpeed HEAD"), step("env | grep -i proxy")),
    manual="""pip was told to install from git, or a build clones another repository, and git did not reach it.

Why it matters: Nothing is installed; pip's own last lines hide the reason.""",
    signatures=(
        Signature(
            words="unable+access+fatal",
            pattern=r"fatal: unable to access '(?:https?://)?(?:[^@'/]{1,80}@)?(?P<host>[\w.:-]{1,80})[^']{0,200}': "
            r"(?P<why>.{1,120})",
            sample="fatal: unable to access 'https://github.com/microsoft/DeepSpeed.git/': Failed to connect to "
            "github.com port 443: Connection timed out",
        ),
        Signature(
            words="rpc+failed",
            pattern=r"error: (?P<why>RPC failed; .{1,100})",
            title="git's transfer broke off: {why}",
            sample="error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.",
        ),
    ),
)

RULES = (
    PIP_COMPILER_MISSING,
    PIP_WHEEL_FAILED,
    PIP_REQUIREMENTS_MISSING,
    PIP_CANNOT_UNINSTALL,
    GIT_UNREACHABLE,
)
