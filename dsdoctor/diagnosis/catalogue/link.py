"""Rules of linking: libraries that the linker does not find, in any language."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.linker import linker
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

CUDA_LIBRARIES = (
    r"cudart(?:_static)?|cudadevrt|curand(?:_static)?|cublas(?:Lt)?|cusparse(?:Lt)?|cusolver|cufft|nvrtc|nvToolsExt"
    r"|nvJitLink|nvtx|nccl|cudnn\w{0,40}"
)
A_COMMAND = r" -(?:shared|o|L|L/\S*|Wl)\b|-Wl,|\$ldflags"


def unlinkable(names: str) -> str:
    """A pattern for a library that ld, lld or Windows' linker did not find, in any language."""
    return rf"{linker()}-l(?P<library>{names})\b|LNK1(?:181|104)\b.{{0,120}}?\b(?P<library2>{names})\.lib"


CUDA_LIB_LINK_MISSING = Rule(
    id="cuda-lib-link-missing",
    stage=Stage.LINK,
    title="the linker does not find -l{library}{home_hint}",
    fix="give the linker a folder that holds lib{library}.so (not only lib{library}.so.N); dsdoctor's toolkit does",
    steps=(
        step('eval "$(python -m dsdoctor env)"'),
        step("python -m dsdoctor prebuild"),
        instead('export LIBRARY_PATH="$CUDA_HOME/lib64:$LIBRARY_PATH"'),
    ),
    manual="""The op links a library of the CUDA toolkit, and no folder on the link line has it.

conda keeps it in lib or targets/*/lib instead of lib64, PyPI's wheels carry only versioned files
(libcurand.so.10), or CUDA_HOME is another folder. `python -m dsdoctor toolkit` assembles a folder with the
unversioned names.

Why it matters: Everything is compiled, and then the op cannot be linked.""",
    explained_by=("cuda-home-wrong",),
    signatures=(
        Signature(
            words="lcudart lcudart_static lcudadevrt lcurand lcublas lcublaslt lcusparse lcusolver lcufft lnvrtc "
            "lnvtoolsext lnvjitlink lnccl lcudnn "
            "lnk1181 lnk1104 lcurand_static lcusparselt lnvtx",
            pattern=unlinkable(CUDA_LIBRARIES),
            unless=A_COMMAND,
            tier=Tier.FILE,
            sample="/usr/bin/ld: cannot find -lcurand: No such file or directory",
        ),
        Signature(
            words="library+find library+found",
            pattern=rf"(?:unable to find library -l|library not found(?: for -l|: ))(?P<library>{CUDA_LIBRARIES})\b",
            unless=A_COMMAND,
            tier=Tier.FILE,
            sample="ld.lld: error: unable to find library -lcudart",
        ),
    ),
)

LIBCUDA_STUB_MISSING = Rule(
    id="libcuda-stub-missing",
    stage=Stage.LINK,
    title="the linker does not find libcuda, the driver's library",
    fix="link against the toolkit's stub where there is no driver; with a driver, put its folder on the link path",
    steps=(
        step('export LIBRARY_PATH="$CUDA_HOME/lib64/stubs:$LIBRARY_PATH"'),
        instead('export LIBRARY_PATH="/usr/lib/wsl/lib:$LIBRARY_PATH"', note="WSL"),
        instead('eval "$(python -m dsdoctor env)"'),
    ),
    manual="""The linker does not find libcuda, which belongs to the driver.

An image without a driver, WSL (/usr/lib/wsl/lib) and conda's linker do not have it where the linker looks. For
linking the stub in the toolkit's lib64/stubs is enough.

Why it matters: The op cannot be linked. To run it, the real driver is needed (docker run --gpus all).""",
    signatures=(
        Signature(
            words="lcuda lnk1181 lnk1104",
            pattern=unlinkable("cuda"),
            unless=r" -(?:shared|o|L)\b|skipping incompatible|passe|überspring",
            tier=Tier.FILE,
            sample="/usr/bin/ld: cannot find -lcuda: No such file or directory",
        ),
        Signature(
            words="library+find library+found",
            pattern=r"(?:unable to find library -l|library not found(?: for -l|: ))cuda\b",
            unless=A_COMMAND,
            tier=Tier.FILE,
            sample="ld.lld: error: unable to find library -lcuda",
        ),
        Signature(
            words="libcuda",
            pattern=r"libcuda\.so(?:\.1)?: (?:cannot open shared object|[^\s\w]|kann|no se puede|impossible|não)",
            title="libcuda.so.1, the driver's library, is not here",
            fix="run where the driver is: with a GPU (docker run --gpus all), or without the CUDA ops",
            steps=(step("nvidia-smi"), step("python -m dsdoctor look")),
            sample="ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="lcuda",
            pattern=linker(220) + r"libcuda\.so\S{0,160} .{0,40}-lcuda\b",
            tier=Tier.PROBE,
            title="the linker met a libcuda of another architecture first",
            sample="/usr/bin/ld: skipping incompatible /usr/lib/i386-linux-gnu/libcuda.so when searching for -lcuda",
        ),
    ),
)

GDS_LINK = Rule(
    id="gds-link",
    stage=Stage.LINK,
    title="gds needs cuFile, and {library|it} cannot be used here",
    fix="install cuFile's development files of your CUDA release, or leave gds out",
    steps=(
        step("sudo apt install libcufile-dev-{cuda_dashed|12-8}"),
        instead("DS_BUILD_GDS=0 python -m pip install --no-build-isolation deepspeed"),
    ),
    manual="""gds (GPUDirect Storage) links libcufile of the CUDA toolkit, and that failed.

PyPI's wheels bring only libcufile.so.0. On a glibc before 2.34 libcufile needs -ldl, and the probe fails with
undefined references to dlopen.

Why it matters: gds is not built. The lines of the probe are harmless where nobody uses gds.""",
    signatures=(
        Signature(
            words="cufile",
            pattern=r"(?::\d+(?::\d+)?: ?[^:：]{2,60}[:：]\s?|cannot open source file\s?)['\"‘“]?(?P<library>cufile\.h)",
            tier=Tier.FILE,
            sample="csrc/gds/py_lib/deepspeed_gds_utils.h:20:10: fatal error: cufile.h: No such file or directory",
        ),
        Signature(
            words="gds",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>gds) op due to it not being compatible",
            sample="RuntimeError: Unable to JIT load the gds op due to it not being compatible due to "
            "hardware/software issue. None",
        ),
        Signature(
            words="libcufile",
            pattern=r"(?P<library>libcufile\.so[.\d]*): (?:cannot open shared object|[^\s\w]|kann |no se puede)",
            sample="ImportError: libcufile.so.0: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="libcufile",
            pattern=r"(?P<library>libcufile\S{0,12}): undefined reference to "
            r"[`'‘](?:dl(?:open|sym|close|error|vsym)|.{1,160}@)",
            tier=Tier.PROBE,
            op="gds",
            sample="/usr/bin/ld: /usr/local/cuda/lib64/libcufile.so: undefined reference to `dlopen'",
        ),
        Signature(
            words="lcufile",
            pattern=linker() + r"-l(?P<library>cufile)\b",
            unless=A_COMMAND,
            tier=Tier.PROBE,
            op="gds",
            title="the linker found no cuFile: harmless unless you use gds",
            sample="/usr/bin/ld: cannot find -lcufile: No such file or directory",
        ),
    ),
)

RULES = (
    CUDA_LIB_LINK_MISSING,
    LIBCUDA_STUB_MISSING,
    GDS_LINK,
)
