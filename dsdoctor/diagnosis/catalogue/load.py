"""Rules of loading what was built: symbols and libraries that are missing or of another release."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

FOREIGN = r"(?:site|dist)-packages[/\\](?!deepspeed[/\\]|torch[/\\]|nvidia[/\\]|torch_extensions)"
"""A place where a package other than DeepSpeed and torch is installed."""

TORCH_ABI_MISMATCH = Rule(
    id="torch-abi-mismatch",
    stage=Stage.LOAD,
    title="{file|the op} was built against another torch than the one that loads it{torch_hint}",
    fix="build the op again for this torch, and remove what was built for the other",
    steps=(
        step("python -m dsdoctor prebuild"),
        step("mv ~/.cache/torch_extensions ~/.cache/torch_extensions.old"),
        step("python -m dsdoctor check --deep"),
    ),
    manual="""An op was built against another torch than the one that loads it.

A compiled op calls torch's C++ functions by their mangled names, and these change from release to release and
between CPU and CUDA builds. `undefined symbol: _ZN3c10...` means that torch was changed after the op was built,
or that a wheel or a cached .so of another environment is loaded.

Why it matters: The op cannot be loaded, and no setting at run time helps: it fits only the torch it was built
with.""",
    signatures=(
        Signature(
            words="undefined+symbol undefined+reference symbol+found",
            pattern=r"(?:(?<![\w.+-])(?P<file>[\w.+-]{1,120}\.so)[^\s/]{0,160}: )?(?:undefined symbol: "
            r"|[Ss]ymbol not found.{0,24}[:'] ?_?)(?P<symbol>_Z\w*?(?:3c10|c104"
            r"|2at|5torch|6caffe2|4c10d)\w*|(?:c10|at|torch)::\S{0,160}"
            r"|THP\w+|aoti_torch\w+)",
            unless=FOREIGN,
            sample="ImportError: /venv/lib/python3.10/site-packages/deepspeed/ops/adam/cpu_adam_op.so: undefined "
            "symbol: "
            "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs",
        ),
        Signature(
            words="cannot+shared",
            pattern=r"(?P<library>lib(?:torch|c10|caffe2)\w{0,60}\.so[.\d]*): cannot open shared object",
            title="{library} is not part of this torch: the op was built against another one",
            sample="ImportError: libtorch_cuda_cu.so: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="winerror+torch_python winerror+c10 winerror+torch_cpu",
            pattern=r"WinError 127\].{0,160}?(?P<file>(?:torch_python|c10|torch_cpu)\.dll)",
            title="{file} lacks a function that another library asks for: parts of two torches are mixed",
            fix="install torch afresh, and build the ops for it",
            steps=(
                step(
                    "python -m pip install --force-reinstall {torch_requirement|torch==VERSION} --index-url "
                    "{torch_index|INDEX}"
                ),
                step("python -m dsdoctor prebuild"),
            ),
            sample="OSError: [WinError 127] The specified procedure could not be found. Error loading "
            '"C:\\venv\\lib\\site-packages\\torch\\lib\\torch_python.dll" or one of its dependencies.',
        ),
        Signature(
            words="dll+load",
            pattern=r"DLL load failed while importing (?P<file>\w+_op|\w*adam\w*|deepspeed\w*): .{0,8}(?:The "
            r"specified procedure|procedure)",
            sample="ImportError: DLL load failed while importing cpu_adam_op: The specified procedure could not "
            "be found.",
        ),
    ),
)


UNDEFINED_SYMBOL_MISSING_LINK = Rule(
    id="undefined-symbol-missing-link",
    stage=Stage.LOAD,
    title="{file|the op} was linked without the library that has {symbol}",
    fix="build it again with that library on the link line",
    steps=(step("python -m dsdoctor prebuild"), step("mv ~/.cache/torch_extensions ~/.cache/torch_extensions.old")),
    manual="""An op calls a function of a library that it was linked without.

Examples are curandCreateGenerator, io_submit and cublas. A builder that saw no CUDA toolkit, or an LDFLAGS with
--as-needed, makes such an op. LD_PRELOAD with the library helps for the moment.

Why it matters: The op does not load, because the loader does not know in which library to look.""",
    signatures=(
        Signature(
            words="undefined+symbol undefined+reference",
            pattern=r"(?:(?<![\w.+-])(?P<file>[\w.+-]{1,120}\.so)[^\s/]{0,160}: )?undefined symbol: "
            r"(?P<symbol>(?:cu(?:rand|blas"
            r"|sparse|solver|fft|File|da)|nvrtc|io_|omp_|GOMP_|__kmpc"
            r"|__cuda|shm_|dnnl|ccl|numa_|ibv_)\w*|cu[A-Z]\w*)",
            unless=r"io_pgetevents|libtorch\w{0,60}\.so|libcu\w{1,60}\.so",
            sample="ImportError: /root/.cache/torch_extensions/py310_cu118/cpu_adam/cpu_adam.so: undefined "
            "symbol: curandCreateGenerator",
        ),
        Signature(
            words="undefined+symbol undefined+reference unresolved",
            pattern=r"(?:undefined reference to [`'‘\"]|error: undefined symbol: "
            r"|LNK2019.{0,80}symbol (?:__imp_)?)(?P<symbol>(?:cu(?:rand|blas|sparse|solver|File|da)|io_|omp_"
            r"|GOMP_|shm_|__cuda|numa_)\w*|cu[A-Z]\w*)",
            unless=r"io_pgetevents",
            tier=Tier.FILE,
            title="the link line lacks the library that has {symbol}",
            sample="cpu_adam.cpp:(.text+0x1f): undefined reference to `curandSetPseudoRandomGeneratorSeed'",
        ),
    ),
)


CUDA_RUNTIME_LIB_MISSING = Rule(
    id="cuda-runtime-lib-missing",
    stage=Stage.LOAD,
    title="{library} is not here: the op was built for another CUDA release, or the loader does not look where it is",
    fix="build the op for the CUDA release of this torch",
    steps=(
        step("python -m dsdoctor prebuild"),
        instead('export LD_LIBRARY_PATH="$(python -m dsdoctor toolkit)/lib64:$LD_LIBRARY_PATH"'),
    ),
    manual="""A built op names the CUDA runtime it was linked with, and that library was not found.

An op that names libcudart.so.11.0 was built for CUDA 11; torch for CUDA 12 brings libcudart.so.12 only. Where the
release is right, the folder with the library is not on LD_LIBRARY_PATH.

Why it matters: The op cannot be loaded.""",
    signatures=(
        Signature(
            words="importerror+libcudart importerror+libcublas importerror+libcublaslt importerror+libcusparse "
            "importerror+libcusolver "
            "importerror+libnvrtc importerror+libcudnn importerror+libcufft",
            pattern=r"^ImportError: (?P<library>lib(?:cudart|cublas|cublasLt|cusparse|cusolver|nvrtc|cudnn|cufft)\.so["
            r".\d]*): cannot open shared",
            after=r"[/\\](?:flash_attn|apex|transformer_engine|xformers|vllm|mamba_ssm|causal_conv1d)[/\\]\S{1,100}\.p"
            r"y\", line",
            title="a compiled package beside DeepSpeed (flash-attn, apex or the like, see the last frame) was built "
            "for another CUDA than that of torch: "
            "{library} is not here",
            fix="install that package again for this torch and its CUDA; DeepSpeed itself need not be built",
            steps=(
                step("python -c 'import torch; print(torch.__version__, torch.version.cuda)'"),
                step("python -m pip install --force-reinstall --no-deps --no-build-isolation flash-attn"),
            ),
            sample='  File "/venv/site-packages/flash_attn/flash_attn_interface.py", line 8, in <module>\n'
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="libcudart libcurand libcublas libcublaslt libcusparse libcusparselt libcusolver libnvrtc "
            "libnccl libcudnn libcufft libnvtoolsext "
            "libnvjitlink libcupti libnvshmem_host libcudnn_cnn_infer libcudnn_ops_infer libcudnn_cnn libcudnn_graph",
            pattern=r"(?P<library>lib(?:cudart|curand|cublas|cublasLt|cusparse|cusparseLt|cusolver|nvrtc|nccl"
            r"|cudnn\w{0,40}|cufft|nvToolsExt|nvJitLink|cupti"
            r"|nvshmem_host)\.so[.\d]*): (?:cannot open shared object|kann |no se puede|objeto "
            r"compartido|impossible d|não|nie "
            r"można|[^\s\x00-\x7f])",
            unless=r"Could not load dynamic library|dlerror:",
            sample="ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="version+libcudart version+libcudnn version+libnvjitlink version+libcusparse version+libcublas "
            "undefined+version",
            pattern=r"[Vv]ersion [`'‘]?(?P<library>lib(?:cudart|cublas|cudnn|nvJitLink|cusparse)\S{0,160}?)['’]? "
            r"not (?:found|defined)"
            r"|undefined symbol: \S{1,80}, version (?P<library2>lib(?:cudart|nvJitLink|cublas|cusparse)\S{0,160})"
            r"",
            title="another {library} than torch needs is loaded first",
            fix="take the other CUDA folders off LD_LIBRARY_PATH, so that torch finds its own libraries",
            steps=(step("unset LD_LIBRARY_PATH"), step("python -m dsdoctor look")),
            sample="ImportError: libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version "
            "libnvJitLink.so.12",
        ),
        Signature(
            words="dll+load",
            pattern=r"DLL load failed while importing (?P<library>\w+_op|deepspeed\w*)",
            unless=r"procedure",
            tier=Tier.GENERIC,
            title="a library that {library} needs is not on the DLL path",
            sample="ImportError: DLL load failed while importing cpu_adam_op: The specified module could not be found.",
        ),
        Signature(
            words="load+library",
            pattern=r"Could not load library (?P<library>lib(?:cudnn|cublas|nvrtc)\S{1,160}?)\.? Error",
            sample="Could not load library libcudnn_cnn_infer.so.8. Error: libnvrtc.so: cannot open shared "
            "object file: No such file or directory",
        ),
    ),
)


LIBSTDCXX_TOO_OLD = Rule(
    id="libstdcxx-too-old",
    stage=Stage.LOAD,
    title="the library loaded here is older than the op needs: it has no {version}",
    fix="use a newer libstdc++ (conda's libstdcxx-ng, or drop LD_LIBRARY_PATH to an old one), or build the op on "
    "this machine",
    steps=(step("conda install -c conda-forge 'libstdcxx-ng>=13'"), step("python -m dsdoctor prebuild")),
    manual="""The libstdc++.so.6 or libc.so.6 found first at run time is older than the one the op was compiled with.

The op was compiled by a newer g++, or on a newer glibc. Often an old libstdc++ of conda or of LD_LIBRARY_PATH is
found before the system's. GLIBC_... means that the whole system is older than the one that built the wheel.

Why it matters: The op, or torch itself, cannot be loaded.""",
    signatures=(
        Signature(
            words="glibcxx_3 cxxabi_1 glibc_2",
            pattern=r"[`'‘\"«„]?(?P<version>GLIBCXX_[\d.]+\d|CXXABI_[\d.]+\d|GLIBC_2\.\d+)['’\"»“]? (?:not found"
            r"|.{2,40}\()",
            unless=r"dlopen@|undefined reference|required by \S{0,300}?(?:flash_attn|vllm|xformers|bitsandbytes|transf"
            r"ormer_engine)",
            sample="ImportError: /opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by "
            "/root/.cache/torch_extensions/py310_cu121/cpu_adam/cpu_adam.so)",
        ),
    ),
)


OPS_TORCH_VERSION_MISMATCH = Rule(
    id="ops-torch-version-mismatch",
    stage=Stage.LOAD,
    title="DeepSpeed's ops were built with {what} {built|another one}, and {what} {here|this one} is installed",
    fix="build the wheel for the torch that is installed, or install the torch it was built for",
    steps=(step("python -m dsdoctor prebuild"),),
    manual="""DeepSpeed's pre-built ops were made with another torch or CUDA release than the installed one.

DeepSpeed's loader compares the torch (major.minor) and the CUDA release of pre-built ops with what is installed,
and refuses any difference.

Why it matters: A wheel with ops fits exactly one pair: after an upgrade of torch none of its ops loads.""",
    signatures=(
        Signature(
            words="mismatch+ops",
            pattern=r"(?P<what>PyTorch|CUDA|HIP) version mismatch! DeepSpeed ops were "
            r"compiled(?:.{0,240}?Install \w+ version=(?P<built>[\w.+]+),\s+"
            r"Runtime \w+ version=(?P<here>[\w.+]*\w))?",
            sample="RuntimeError: PyTorch version mismatch! DeepSpeed ops were compiled and installed with a "
            "different version than what is being "
            "used at runtime. Please re-install DeepSpeed or switch torch versions. Install torch version=2.14, "
            "Runtime torch version=2.13",
        ),
    ),
)

RULES = (
    TORCH_ABI_MISMATCH,
    UNDEFINED_SYMBOL_MISSING_LINK,
    CUDA_RUNTIME_LIB_MISSING,
    LIBSTDCXX_TOO_OLD,
    OPS_TORCH_VERSION_MISMATCH,
)
