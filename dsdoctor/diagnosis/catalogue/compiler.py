"""Rules of the host compiler: missing, too old, too new, killed."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

COMPILER = r"(?:c\+\+|g\+\+|gcc|cc|clang|clang\+\+|icpx?)(?:-[\d.]{1,20})?"
COMPILERS = rf"(?:[\w.-]{{0,60}}-)?{COMPILER}"

HOST_COMPILER_TOO_OLD = Rule(
    id="host-compiler-too-old",
    stage=Stage.COMPILE,
    title="the host compiler {gcc} is too old for this torch's headers",
    fix="use a newer g++ (torch 2 asks for 9, its C++20 headers for 10 or newer) and name it in CC and CXX",
    steps=(
        step("sudo apt install g++-12"),
        instead("conda install -c conda-forge gxx_linux-64=12", note="without root; then CC and CXX are set by it"),
        step("export CC=gcc-12 CXX=g++-12"),
    ),
    manual="""The host compiler is too old for the headers of this torch.

They need a compiler for C++14, 17 or 20: GCC 5, then 9, then 10 or newer. nvcc takes the compiler that CC names.
`python -m dsdoctor plan` shows which compiler it would take and why.

Why it matters: Neither the CPU ops nor the CUDA ops can be compiled.""",
    signatures=(
        Signature(
            words="installed+version+cuda",
            pattern=r"The current installed version of (?P<compiler>\S{1,160}) "
            r"\((?P<gcc>(?!0\.0\.0)[^)]{1,30})\) is less than the minimum required version "
            r"by CUDA (?P<nvcc>[\d.]+)",
            title="{compiler} {gcc} is older than CUDA {nvcc} demands",
            sample="RuntimeError: The current installed version of c++ (4.8.5) is less than the minimum required "
            "version by CUDA 11.8 "
            "(6.0.0). Please make sure to use an adequate version of c++ (>=6.0.0, <12.0).",
        ),
        Signature(
            words="gcc+old clang+old",
            pattern=r"too old version of (?P<kind>GCC|Clang)\. We need (?P=kind) (?P<least>\d+)",
            tier=Tier.FILE,
            title="torch's headers need {kind} {least}, and the compiler is older",
            sample="c10/util/C++17.h:13:2: error: #error \"You're trying to build PyTorch with a too old version "
            "of GCC. We need GCC 9 "
            'or later."',
        ),
        Signature(
            words="dialect+supported unrecognized+std std+invalid std+flag std+defined std+20 std+17 std+14",
            pattern=r"(?:unrecognized command[- ]line option ['\"`]?|(?:c\+\+|g\+\+|cc1plus)\S{0,20} "
            r"[^'\"-]{4,60}['\"])"
            r"-std=(?P<std>(?:c|gnu)\+\+\w+)['\"`]?|invalid value "
            r"'(?P<std2>c\+\+\d\w)' in '-std"
            r"|[Tt]he (?P<std5>c\+\+\d\w) dialect is not supported with the configured host"
            r"|(?P<std3>-std=c\+\+\d\w)['\"’”»]? flag is not supported with the configured host compiler"
            r"|Value '(?P<std4>c\+\+\d\w)' is not defined for option 'std'",
            tier=Tier.FILE,
            title="the compiler does not know the C++ standard that torch needs ({std|-std})",
            sample="c++: error: unrecognized command line option '-std=c++17'",
        ),
        Signature(
            words="concepts compare+error compare+fehler span+error span+fehler ranges+error bit+error "
            "source_location charconv filesystem optional+error "
            "string_view+error variant+error numbers+error coroutine+error any+error concepts+erreur",
            pattern=r":\d+(?::\d+)?: [^:：]{2,60}[:：]\s?'?(?P<header>concepts|compare|span|ranges|bit"
            r"|source_location|charconv|filesystem|optional"
            r"|string_view|variant|any|numbers|coroutine)'?(?:[:：] ?\S| file not found)",
            tier=Tier.FILE,
            title="the compiler's library has no <{header}>",
            sample="/venv/lib/torch/include/c10/util/x.h:3:10: fatal error: concepts: No such file or directory",
        ),
        Signature(
            words="abi+incompatible",
            pattern=r"Your compiler \((?P<compiler>[^)]{1,60})\) may be ABI-incompatible",
            tier=Tier.PROBE,
            title="{compiler} may be too old for torch",
            sample="Your compiler (c++ 4.8.5) may be ABI-incompatible with PyTorch!",
        ),
    ),
)

HOST_COMPILER_TOO_NEW = Rule(
    id="host-compiler-too-new",
    stage=Stage.COMPILE,
    title="the host compiler is newer than this nvcc{nvcc_hint} supports",
    fix="use an older g++ beside it and name it in CC and CXX",
    steps=(
        step("sudo apt install g++-{newest|12}"),
        step("export CC=gcc-{newest|12} CXX=g++-{newest|12}"),
        step("python -m dsdoctor prebuild"),
    ),
    manual="""The host compiler is newer than this nvcc supports.

Every nvcc takes host compilers up to a release: CUDA 11.8 up to GCC 11, 12.4 up to 13, 12.8 up to 14, 13.0 up to
15. A newer toolkit that still fits torch helps as well.

Why it matters: nvcc refuses to compile. NVCC_APPEND_FLAGS=-allow-unsupported-compiler only switches off the
check.""",
    signatures=(
        Signature(
            words="unsupported+gnu",
            pattern=r"#error -- unsupported GNU version! gcc versions later than (?P<newest>\d+)",
            tier=Tier.FILE,
            title="this nvcc{nvcc_hint} takes gcc up to {newest}, the host compiler is newer",
            sample="/usr/local/cuda/include/crt/host_config.h:139:2: error: #error -- unsupported GNU version! "
            "gcc versions later than 11 "
            "are not supported!",
        ),
        Signature(
            words="unsupported+version",
            pattern=r"#error.{0,12}unsupported (?:clang|Microsoft Visual Studio) version",
            tier=Tier.FILE,
            steps=(step("python -m dsdoctor plan"),),
            sample="/usr/local/cuda/include/crt/host_config.h(153): fatal error C1189: #error:  -- unsupported "
            "Microsoft Visual Studio "
            "version! Only the versions between 2017 and 2022 (inclusive) are supported!",
        ),
        Signature(
            words="installed+version+cuda",
            pattern=r"The current installed version of (?P<compiler>\S{1,160}) \((?P<gcc>[^)]{1,30})\) is "
            r"greater than the maximum required version "
            r"by CUDA (?P<nvcc>[\d.]{1,12}\d)(?:.{0,120}<=?\s?(?P<below>\d+))?",
            title="{compiler} {gcc} is newer than CUDA {nvcc} supports",
            steps=(step("python -m dsdoctor plan"), step("export CC=gcc-12 CXX=g++-12")),
            sample="RuntimeError: The current installed version of g++ (13.2.0) is greater than the maximum "
            "required version by CUDA 11.8. "
            "Please make sure to use an adequate version of g++ (>=6.0.0, <12.0).",
        ),
        Signature(
            words="identifier+undefined exception+specification type+allowed type+specifiers vector_size "
            "attribute+error",
            pattern=r"(?:lib/gcc/\S{1,80}/include/\w+\.h|/usr/include/(?:[\w+.-]+/){0,4}bits/\w[\w-]*\.h"
            r"|/usr/include/std\w+\.h|/include/c\+\+/[\w.]+/\w+)"
            r"\(\d+\): error: (?:identifier \"?[_\w]+\"? is undefined|type name is not allowed|invalid "
            r"combination of type "
            r"specifiers|vector_size attribute|attribute \"__\w+\" does not take"
            r"|exception specification is incompatible)|error: exception specification is incompatible with that "
            r"of previous function",
            tier=Tier.FILE,
            title="the headers of the host compiler or C library are newer than this nvcc{nvcc_hint} understands",
            steps=(step("python -m dsdoctor plan"), step("export CC=gcc-12 CXX=g++-12")),
            sample="/usr/lib/gcc/x86_64-linux-gnu/13/include/amxtileintrin.h(42): error: identifier "
            '"__builtin_ia32_ldtilecfg" is undefined',
        ),
    ),
)

COMPILER_OOM_KILLED = Rule(
    id="compiler-oom-killed",
    stage=Stage.COMPILE,
    title="{program|a compiler} was killed: the memory ran out",
    fix="run fewer compilers at once, for fewer architectures",
    steps=(
        step("python -m dsdoctor build-wheel --jobs 1"),
        instead("MAX_JOBS=1 DS_NVCC_THREADS=1 python -m pip install --no-build-isolation deepspeed"),
    ),
    manual="""A compiler was killed because the memory ran out.

A compile with torch's headers takes 1.5 to 3.5 GB of memory, and nvcc runs one for every architecture. ninja
starts as many as there are processors, whatever the memory or the container's limit. `python -m dsdoctor
build-wheel` limits its jobs by the memory that the control group leaves.

Why it matters: The build ends with "Killed" or with an internal compiler error, and a second attempt with the
same settings ends the same way.""",
    signatures=(
        Signature(
            words="killed+program killed+error cc1plus cicc cudafe ptxas",
            pattern=r"Killed signal terminated program (?P<program>\w+)|internal compiler error: Killed "
            r"\(program (?P<program2>\w+)"
            r"|(?:[Kk]illed|已杀死|被杀死|[Gg]etötet|Убит|強制終了).{0,60}\b(?P<program3>cc1plus|cicc|cudafe\+\+|ptxas)\b"
            r"|fatal error: Killed|oom-kill:constraint=.{1,400}?\btask=(?P<program4>cc1plus|cicc|cudafe\+\+|ptxas),pid=",
            unless=r"Segmentation|died due to signal 11",
            tier=Tier.FILE,
            sample="c++: fatal error: Killed signal terminated program cc1plus",
        ),
        Signature(
            words="died terminated+signal unable+killed",
            pattern=r"'?(?P<program>cicc|cudafe\+\+|ptxas|nvcc|fatbinary|ninja|nvlink)(?!\w).{0,60}died (?:due "
            r"to|with) "
            r"(?:signal 9|status 137|<Signals\.SIGKILL)|\b(?P<program2>ld|collect2|as|cc1plus)\b.{0,12} "
            r"terminated with signal 9"
            r"|(?P<program3>clang\S{0,4}): (?:fatal )?error: unable to execute command: Killed",
            tier=Tier.FILE,
            sample="nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        ),
        Signature(
            words="command+137 command+9",
            pattern=r"error: command '?(?P<program>\S{0,120}(?:gcc|g\+\+|c\+\+|cc|nvcc|clang))'? (?:failed with "
            r"exit (?:status|code)|terminated by signal)"
            r" (?:137|-?9)\b",
            tier=Tier.FILE,
            sample="error: command '/usr/bin/x86_64-linux-gnu-g++' failed with exit code 137",
        ),
        Signature(
            words="memory+exhausted memory+out out+memory+allocating heap c1060 killed+process",
            pattern=r"virtual memory exhausted|(?P<program>cc1plus|as|ld|cicc|collect2|cudafe\+\+)\S{0,4}:? out "
            r"of memory|out of memory allocating \d+ bytes"
            r"|fatal error C1060|LLVM ERROR: out of memory|Killed process \d+,? \((?P<program2>cc1plus|cicc|ptxas"
            r"|cudafe\+\+|nvcc|ld|ninja)\)",
            tier=Tier.FILE,
            sample="cc1plus: out of memory allocating 65536 bytes after a total of 2147483648 bytes",
        ),
        Signature(
            words="killed",
            pattern=r"(?:^|\s)Killed\s{1,40}(?P<program>\S{0,160}(?:c\+\+|g\+\+|gcc|nvcc|ninja|cicc|cc1plus))(?!\w)",
            tier=Tier.GENERIC,
            sample="/bin/sh: line 1: 412 Killed                  /usr/bin/c++ -MMD -c cpu_adam.cpp",
        ),
    ),
)

HOST_COMPILER_MISSING = Rule(
    id="host-compiler-missing",
    stage=Stage.COMPILE,
    title="there is no C++ compiler{compiler_hint}",
    fix="install g++ (on Windows: the Visual Studio build tools, and their own prompt)",
    steps=(
        step("sudo apt install build-essential"),
        instead("conda install -c conda-forge gxx_linux-64", note="without root"),
    ),
    manual="""There is no C++ compiler, or it lacks a part of itself (cc1plus).

DeepSpeed's ops are C++: even the CPU ones need g++, and nvcc needs it as its host compiler. On Windows cl.exe
must be on PATH, as in the x64 Native Tools prompt of Visual Studio. `python -m dsdoctor look` lists the compilers
that are here.

Why it matters: No op can be compiled.""",
    signatures=(
        Signature(
            words="gcc+found cc+found c+found g+found clang+found gcc+befehl c+befehl gcc+kommando c+kommando "
            "gcc+orden c+orden gcc+commande c+commande "
            "未找到命令 コマンドが見つかりません команда",
            pattern=rf"(?:^|[\s:'\"/])(?P<compiler>{COMPILERS})['\"]?: (?:command not found|not found|Befehl "
            rf"nicht gefunden|Kommando nicht gefunden"
            r"|orden no encontrada|commande introuvable|未找到命令|コマンドが見つかりません|команда не найдена)"
            rf"|command not found: (?P<compiler2>{COMPILERS})$",
            tier=Tier.FILE,
            sample="/bin/sh: 1: c++: not found",
        ),
        Signature(
            words="directory+gcc directory+c directory+g directory+cc directory+clang execute+unable "
            "command+which command+failed+directory",
            pattern=rf"No such file or directory: '?\"?(?P<compiler>{COMPILERS})'?\"?|unable to execute "
            rf"'?(?P<compiler2>\S{{0,120}}?{COMPILER})'?:"
            rf"|command '?(?P<compiler3>\S{{0,120}}?{COMPILER})'? failed: No such file|\['which', "
            rf"'(?P<compiler4>{COMPILERS})'\].{{0,60}}non-zero",
            unless=r"-c \S{1,160}|cc1plus|nvcc",
            sample="error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory",
        ),
        Signature(
            words="cc1plus cc1 execvp",
            pattern=r"cannot execute ['\"‘`]?(?P<compiler>cc1plus|cc1)|trying to exec '(?P<compiler2>cc1plus"
            r"|cc1)'|['‘“«](?P<compiler3>cc1plus)['’”»]?.{0,60}execvp",
            tier=Tier.FILE,
            title="gcc is there, but its C++ part {compiler} is not",
            sample="gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory",
        ),
        Signature(
            words="installed+version+cuda",
            pattern=r"The current installed version of (?P<compiler>\S{1,160}) \(0\.0\.0\) is less than",
            title="torch could not ask {compiler} for its version: it is not there, or no compiler",
            sample="RuntimeError: The current installed version of g++ (0.0.0) is less than the minimum required "
            "version by CUDA 13.0 (6.0.0).",
        ),
        Signature(
            words="host+compiler+unsupported",
            pattern=r"nvcc fatal .{0,12}Host compiler targets unsupported OS",
            title="nvcc cannot use its host compiler",
            sample="nvcc fatal   : Host compiler targets unsupported OS.",
        ),
        Signature(
            words="compiler+found compiler+find",
            pattern=r"No working C\+\+ compiler found|Failed to find (?:a )?C(?:\+\+)? compiler"
            r"|Unable to find (?:a )?C\+\+ compiler",
            sample="RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        ),
        Signature(
            words="checking+compiler+version",
            pattern=r"Error checking compiler version for (?P<compiler>[\w.+-]{1,60}): (?:\[WinError "
            r"2\]|\[Errno 2\]|Command)",
            tier=Tier.GENERIC,
            sample="UserWarning: Error checking compiler version for cl: [WinError 2] The system cannot find "
            "the file specified",
        ),
        Signature(
            words="compiler+cl msvc visual+required where+cl preprocess",
            pattern=r"Cannot find compiler '(?P<compiler>cl)(?:\.exe)?'|MSVC is required|Microsoft Visual C\+\+ "
            r"14\.\d+ (?:or greater )?is required"
            r"|\['where', '(?P<compiler2>cl)'\].{0,60}non-zero|Failed to preprocess host compiler properties",
            sample="nvcc fatal   : Cannot find compiler 'cl.exe' in PATH",
        ),
    ),
)

HOST_COMPILER_OTHER_KIND = Rule(
    id="host-compiler-other-kind",
    stage=Stage.COMPILE,
    title="nvcc does not take this host compiler{compiler_hint}: it needs g++ or clang++",
    fix="name a g++ in CC and CXX: modules of NVIDIA's HPC SDK, of Cray and of Intel set both to their own compilers",
    steps=(
        step('echo "$CC $CXX $NVCC_PREPEND_FLAGS"; which g++'),
        step("export CC=gcc CXX=g++"),
        step("python -m dsdoctor prebuild"),
    ),
    manual="""The compiler that CC or CXX names is none that nvcc works with.

nvcc's header host_config.h refuses what it was not tested with: nvc++ and nvc of the HPC SDK (but for one release),
pgc++, icc and icpc, xlC. torch only warns that its compiler was another one. On clusters a loaded module sets CC.

Why it matters: No CUDA op can be compiled. -allow-unsupported-compiler only switches off the check.""",
    signatures=(
        Signature(
            words="unsupported+compiler unsupported+configuration",
            pattern=r"#error\S{0,2}(?: directive:)?.{0,4}-- unsupported (?P<compiler>NVHPC|PGI|pgc\+\+|ICC|xlC|icx?|Intel)"
            r" (?:compiler|configuration)",
            tier=Tier.FILE,
            sample='"/usr/local/cuda/include/crt/host_config.h", line 164: catastrophic error: #error directive: -- '
            "unsupported NVHPC compiler found! nvc++ is the only NVHPC compiler that is supported.",
        ),
        Signature(
            words="nvcc+unsupported+compiler nvcc+unsupported+found",
            pattern=r"^nvcc fatal {1,4}: Unsupported (?P<compiler>NVHPC|PGI|ICC|Intel|xlC) compiler",
            tier=Tier.FILE,
            sample="nvcc fatal   : Unsupported NVHPC compiler found. nvc++ is the only NVHPC compiler that is supported.",
        ),
        Signature(
            words="compiler+compatible+pytorch",
            pattern=r"Your compiler \((?P<compiler>[\w+./-]{1,120})\) is not compatible with the compiler Pytorch was",
            tier=Tier.PROBE,
            title="{compiler} is not the kind of compiler that torch was built with: harmless if its objects link",
            sample="Your compiler (nvc++) is not compatible with the compiler Pytorch was",
        ),
    ),
)

RULES = (
    HOST_COMPILER_TOO_OLD,
    HOST_COMPILER_OTHER_KIND,
    HOST_COMPILER_TOO_NEW,
    COMPILER_OOM_KILLED,
    HOST_COMPILER_MISSING,
)
