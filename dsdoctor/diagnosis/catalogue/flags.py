"""Rules of code and compiler flags that do not fit each other: the C++ standard, SIMD, a bug of nvcc."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

CXX_STANDARD_TOO_LOW = Rule(
    id="cxx-standard-too-low",
    stage=Stage.COMPILE,
    title="torch's headers demand C++{least|17 or newer}, the builder passes {standard|an older -std}",
    fix="take a DeepSpeed that passes the standard this torch needs; dsdoctor builds with the right one",
    steps=(
        step("python -m dsdoctor prebuild --source newest"),
        instead("python -m pip install -U --no-build-isolation deepspeed"),
    ),
    manual="""DeepSpeed's builder passes an older C++ standard than this torch's headers need.

The builder passes a fixed -std: C++14, 17 or 20, by its release. torch 1.5 asks for C++14, 2.1 for C++17, 2.12 or
2.14 for C++20. dsdoctor sets the standard that the installed headers need.

Why it matters: An older DeepSpeed with a newer torch fails in torch's own headers, which looks like a broken
torch.""",
    explained_by=("host-compiler-too-old",),
    signatures=(
        Signature(
            words="compatible+compiler+required need+compile",
            pattern=r"#error:?\s{1,3}\"?(?:C\+\+(?P<least>\d\d) or later compatible compiler is required|You "
            r"need C\+\+(?P<least2>\d\d) to compile PyTorch)",
            tier=Tier.FILE,
            sample="torch/include/ATen/ATen.h:4:2: error: #error C++17 or later compatible compiler is required "
            "to use ATen.",
        ),
        Signature(
            words="onwards requires+least versions+less",
            pattern=r"is only available from C\+\+(?P<least>\d\d) onwards|(?:Thrust|CUB|libcu\+\+|CCCL) requires "
            r"at least C\+\+ ?(?P<least2>\d\d)|#error.{0,4}C\+\+ versions less than C\+\+(?P<least3>\d\d)",
            tier=Tier.FILE,
            sample="note: 'std::optional' is only available from C++17 onwards",
        ),
        Signature(
            words="std+error",
            pattern=r"error: (?:(?:no (?:member|template|type) named )?'(?P<name>is_\w{1,24}_v|optional|string_view"
            r"|variant|any|byte"
            r"|conjunction_v|disjunction_v|void_t|apply|clamp|span|source_location|remove_cvref_t|same_as|bit_cast"
            r"|ranges|concepts)'"
            r" (?:is not a member of|in namespace) 'std'|namespace \"std\" has no member(?: class)? "
            r"\"(?P<name2>is_\w{1,24}_v|optional|string_view|variant|any|byte|apply|clamp|void_t|span|source_location"
            r"|same_as|bit_cast"
            r"|remove_cvref\w*|ranges|conjunction_v|disjunction_v|invoke\w*|filesystem|make_unique|enable_if_t)\")",
            tier=Tier.FILE,
            title="std::{name} is of a newer C++ than the builder asked for ({standard|an older -std})",
            sample="c10/util/Half.h:12:5: error: 'optional' in namespace 'std' does not name a template type",
        ),
        Signature(
            words="only+available extension+extensions",
            pattern=r"error: .{1,80} only available with '?-std=c\+\+(?P<least>\d\w)|error: .{1,80}(?:is a"
            r"|are a) C\+\+(?P<least2>\d\d) extension",
            tier=Tier.FILE,
            sample="x.h:77:3: error: 'if constexpr' only available with '-std=c++17' or '-std=gnu++17' [-Werror]",
        ),
        Signature(
            words="concept requires+error",
            pattern=r"error: (?:'concept' does not name a type|'requires' (?:was not declared|does not name)"
            r"|identifier \"(?:concept|requires)\" is undefined)",
            tier=Tier.FILE,
            title="torch's headers use C++20 concepts, the builder passes {standard|an older -std}",
            sample="c10/core/x.h:20:1: error: 'concept' does not name a type",
        ),
    ),
)

SIMD_FLAG_MISMATCH = Rule(
    id="simd-flag-mismatch",
    stage=Stage.COMPILE,
    title="the code asks for SIMD instructions that the compiler's flags do not allow",
    fix="build on a machine like the one it runs on, with a compiler and an assembler that know its instructions",
    steps=(step("lscpu | grep -i flags"), step("python -m dsdoctor prebuild --ops cpu_adam")),
    manual="""The code uses SIMD instructions that the compiler's flags do not allow.

DeepSpeed chooses the SIMD code (AVX512, AVX2, scalar) by what py-cpuinfo or lscpu reports, and the instructions
by -march=native. The two disagree with a wrapper or CFLAGS that change -march, on an emulated processor, or with
old binutils.

Why it matters: The compiler or the assembler refuses the file, and the CPU op is not built.""",
    signatures=(
        Signature(
            words="inlining target+mismatch",
            pattern=r"inlining failed in call to .{0,20}always_inline.{0,200}|target specific option mismatch",
            tier=Tier.FILE,
            sample="/usr/lib/gcc/x86_64-linux-gnu/12/include/avx512fintrin.h:7998:1: error: inlining failed in "
            "call to 'always_inline' "
            "'_mm512_storeu_ps': target specific option mismatch",
        ),
        Signature(
            words="declared+scope instruction+such march+value march+unrecognized march+support target+cpu",
            pattern=r"error: ['‘]?_mm(?:256|512)?_\w+['’]? was not declared|Error: no such instruction: `?v"
            r"|(?:bad|unknown) value \(?['‘]?[\w-]{1,30}['’]?\)?"
            r" for ['‘]?-march|unrecognized command[- ]line option ['‘]?-march=native|does not support '-march="
            r"|error: unknown target CPU '",
            tier=Tier.FILE,
            sample="/tmp/ccx.s:41: Error: no such instruction: `vmovdqu8 (%rax),%zmm0'",
        ),
        Signature(
            words="feature+requires",
            pattern=r"requires target feature 'avx|without AVX512F enabled changes the ABI.{0,20}error",
            tier=Tier.FILE,
            sample="error: always_inline function '_mm512_add_ps' requires target feature 'avx512f', but would "
            "be inlined",
        ),
    ),
)

NVCC_GCC11_BUG = Rule(
    id="nvcc-gcc11-bug",
    stage=Stage.COMPILE,
    title="nvcc {nvcc|11.5 to 11.7.0} cannot parse the C++ library of GCC 11",
    fix="use g++ 10 for nvcc 11.5 to 11.7.0, or a toolkit of 11.7.1 or newer",
    steps=(step("sudo apt install g++-10"), step("export CC=gcc-10 CXX=g++-10")),
    manual="""nvcc 11.5 to 11.7.0 has a bug with the headers of GCC 11.

It prints `parameter packs not expanded with '...'` in std_function.h. Ubuntu 22.04's own nvcc (11.5) with its own
g++ (11) is such a pair.

Why it matters: No CUDA op can be compiled with that pair, although each of the two is fine by itself.""",
    signatures=(
        Signature(
            words="parameter+packs",
            pattern=r"(?:std_function\.h|/functional|/tuple|type_traits)[:(]\d+[^a-z]{0,12}error: parameter "
            r"packs not expa",
            tier=Tier.FILE,
            sample="/usr/include/c++/11/bits/std_function.h:435:145: error: parameter packs not expanded with '...':",
        ),
    ),
)

RULES = (
    CXX_STANDARD_TOO_LOW,
    SIMD_FLAG_MISMATCH,
    NVCC_GCC11_BUG,
)
