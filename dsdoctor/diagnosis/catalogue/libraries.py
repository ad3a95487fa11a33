"""Rules of the libraries that single ops need: libaio, CUTLASS, oneCCL."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.headers import missing
from dsdoctor.diagnosis.catalogue.linker import linker
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

LIBAIO_MISSING = Rule(
    id="libaio-missing",
    stage=Stage.INSTALL,
    title="async_io needs libaio with its header, and they were not found",
    fix="install libaio's development package, or leave async_io out (only NVMe offload needs it)",
    steps=(
        step("sudo apt install libaio-dev"),
        instead("sudo dnf install libaio-devel"),
        instead("conda install -c conda-forge libaio"),
        step("python -m dsdoctor prebuild --ops async_io"),
    ),
    manual="""async_io compiles against libaio.h and links libaio.so, and they were not found.

The op is for NVMe offload. A libaio outside the system's folders needs CFLAGS=-I... and LDFLAGS=-L...

Why it matters: DeepSpeed leaves the op out: a warning that is harmless where nobody asked for it, and an abort or
a failed run-time compilation where somebody did.""",
    explained_by=("windows-unsupported-op",),
    signatures=(
        Signature(
            words="libaio",
            pattern=missing(r"libaio\.h"),
            unless=r"C1083",
            tier=Tier.FILE,
            title="libaio.h was not found",
            sample="csrc/aio/common/deepspeed_aio_utils.h:12:10: fatal error: libaio.h: No such file or directory",
        ),
        Signature(
            words="async_io",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>async_io) op due to it not being compatible",
            sample="RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to "
            "hardware/software issue. None",
        ),
        Signature(
            words="libaio",
            pattern=r"(?P<library>libaio\.so[.\dt]*): (?:cannot open shared object|\S)",
            unless=r"Reading|=>",
            title="{library} is not there when async_io is loaded",
            sample="ImportError: libaio.so.1: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="libaio",
            pattern=r"requires the dev libaio|requires the libraries: \['libaio|requires libaio but|please "
            r"install the libaio\S{0,8} package",
            tier=Tier.PROBE,
            op="async_io",
            title="async_io is left out, libaio is not here: harmless unless you offload to NVMe",
            sample="[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
        ),
        Signature(
            words="laio",
            pattern=linker() + r"-laio\b",
            unless=r" -(?:shared|o|L)\b",
            tier=Tier.PROBE,
            op="async_io",
            title="the linker found no libaio: harmless unless you offload to NVMe",
            sample="/usr/bin/ld: cannot find -laio: No such file or directory",
        ),
    ),
)

LIBAIO_TOO_OLD = Rule(
    id="libaio-too-old",
    stage=Stage.INSTALL,
    title="this libaio is too old: it has no {symbol}",
    fix="install libaio 0.3.112 or newer, or leave async_io out",
    steps=(
        step("conda install -c conda-forge 'libaio>=0.3.112'"),
        instead("DS_BUILD_AIO=0 python -m pip install --no-build-isolation deepspeed"),
    ),
    manual="""DeepSpeed's async_io calls io_pgetevents, which libaio has only since 0.3.112.

CentOS 7 and Ubuntu 18.04 have older ones. With a newer one outside the system's folders (conda-forge has it),
CFLAGS and LDFLAGS must point at it.

Why it matters: async_io cannot be compiled or loaded, and with it NVMe offload.""",
    signatures=(
        Signature(
            words="io_pgetevents",
            pattern=r"(?:undefined (?:reference to|symbol:?)|was not declared|undeclared|implicit "
            r"declaration).{0,40}(?P<symbol>io_pgetevents)"
            r"|(?P<symbol2>io_pgetevents)['’\"»]?,? (?:was not declared|undeclared|not found|is not defined|version)",
            tier=Tier.FILE,
            sample="deepspeed_aio_common.cpp:99:5: error: 'io_pgetevents' was not declared in this scope",
        ),
    ),
)

CUTLASS_MISSING = Rule(
    id="cutlass-missing",
    stage=Stage.INSTALL,
    title="evoformer_attn needs CUTLASS, and it was not found",
    fix="get CUTLASS and name its folder in CUTLASS_PATH, or leave the op out",
    steps=(
        step("git clone --depth 1 --branch v3.5.1 https://github.com/NVIDIA/cutlass"),
        step('export CUTLASS_PATH="$PWD/cutlass"'),
        step("python -m dsdoctor prebuild --ops evoformer_attn"),
    ),
    manual="""evoformer_attn is compiled with the headers of CUTLASS, and they were not found.

CUTLASS must be 3.1 or newer. Neither torch nor the CUDA toolkit bring it; CUTLASS_PATH names the checkout.

Why it matters: evoformer_attn is left out. The warning is harmless where nobody uses the op.""",
    signatures=(
        Signature(
            words="cutlass",
            pattern=missing(r"cutlass/\S{1,60}|cute/\S{1,60}"),
            tier=Tier.FILE,
            title="{header} was not found",
            sample="csrc/deepspeed4science/evoformer_attn/attention_cu.cu:7:10: fatal error: "
            "cutlass/arch/memory_sm80.h: No such file or "
            "directory",
        ),
        Signature(
            words="cutlass+unable cutlass_path named+cutlass named+cutlass_library",
            pattern=r"Error: (?:Unable to locate CUTLASS|CUTLASS_PATH \S{1,200} does not|'CUTLASS_PATH')|No "
            r"module named '?cutlass",
            sample="RuntimeError: Unable to locate CUTLASS. Install nvidia-cutlass, clone CUTLASS next to "
            "DeepSpeed, or set CUTLASS_PATH to "
            "the CUTLASS checkout.",
        ),
        Signature(
            words="evoformer_attn",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>evoformer_attn) op due to it not being compatible",
            tier=Tier.GENERIC,
            title="evoformer_attn cannot be built here: CUTLASS or a GPU of capability 7.0 is missing",
            sample="RuntimeError: Unable to JIT load the evoformer_attn op due to it not being compatible due to "
            "hardware/software issue. "
            "None",
        ),
        Signature(
            words="cutlass",
            pattern=r"(?:Please specify (?:the )?CUTLASS|Please use CUTLASS version|Please pip install "
            r"nvidia-cutlass|Unable to locate CUTLASS)",
            unless=r"Error:",
            tier=Tier.PROBE,
            op="evoformer_attn",
            title="evoformer_attn is left out, CUTLASS is not here: harmless unless you use it",
            sample="[WARNING]  Please specify the CUTLASS repo directory as environment variable $CUTLASS_PATH",
        ),
    ),
)

ONECCL_HEADER_MISSING = Rule(
    id="oneccl-header-missing",
    stage=Stage.COMPILE,
    title="the CPU accelerator's ccl op needs oneCCL, and it was not found",
    fix="leave the op out, or install oneCCL and source its environment; on a GPU machine set DS_ACCELERATOR=cuda",
    steps=(
        step("DS_BUILD_CCL_COMM=0 python -m pip install --no-build-isolation deepspeed"),
        instead("source /opt/intel/oneapi/ccl/latest/env/vars.sh"),
        instead("export DS_ACCELERATOR=cuda", note="if it is for a GPU"),
    ),
    manual="""deepspeed_ccl_comm, an op of the CPU accelerator, needs oneCCL, and it was not found.

With the CPU accelerator DS_BUILD_OPS=1 builds this op too. It includes oneapi/ccl.hpp and needs CCL_ROOT.

Why it matters: One op that few need stops the whole build. If the machine it runs on has a GPU, the accelerator
is the wrong one.""",
    signatures=(
        Signature(
            words="ccl",
            pattern=missing(r"oneapi/ccl\.hpp|ccl\.hpp"),
            tier=Tier.FILE,
            sample="csrc/cpu/comm/ccl.cpp:8:10: fatal error: oneapi/ccl.hpp: No such file or directory",
        ),
        Signature(
            words="ccl_root lccl",
            pattern=rf"Didn't find CCL_ROOT|{linker()}-lccl\b",
            unless=r" -(?:shared|o|L)\b",
            sample="ValueError: Didn't find CCL_ROOT, install oneCCL from https://github.com/oneapi-src/oneCCL "
            "and source its environment "
            "variable",
        ),
    ),
)

RULES = (
    LIBAIO_MISSING,
    LIBAIO_TOO_OLD,
    CUTLASS_MISSING,
    ONECCL_HEADER_MISSING,
)
