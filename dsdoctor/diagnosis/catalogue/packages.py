"""Rules of Python packages: options of pip, pins that conflict, packages that are missing."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.install import IN_A_BUILD
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

WHEEL_PACKAGE_MISSING = Rule(
    id="wheel-package-missing",
    stage=Stage.INSTALL,
    title="setuptools does not know bdist_wheel: the wheel package is not installed",
    fix="install wheel (or a setuptools of 70.1 or newer) into the same environment",
    steps=(step("python -m pip install -U wheel setuptools"),),
    manual="""setuptools does not have the command bdist_wheel, because the wheel package is not installed.

setuptools before 70.1 takes that command from the wheel package.

Why it matters: Without build isolation the package must be in your own environment, or no wheel of DeepSpeed can
be made.""",
    signatures=(
        Signature(
            words="bdist_wheel",
            pattern=r"invalid command ['\"]bdist_wheel",
            sample="error: invalid command 'bdist_wheel'",
        ),
        Signature(
            words="wheel",
            pattern=r"^wheel(?:[<>=!~]=?[\d.]+)?$",
            after=r"(?:Unmet|Missing) dependencies",
            sample="ERROR Missing dependencies:\n\twheel",
        ),
        Signature(
            words="wheel+named wheels+since wheel+since wheel+available",
            pattern=r"the 'wheel' package is not available|No module named '?\"?wheel\b(?!_)"
            r"|Could not build wheels? for .{0,80}since package 'wheel' "
            r"is not installed",
            sample="ModuleNotFoundError: No module named 'wheel'",
        ),
    ),
)


PIP_GLOBAL_OPTION_REMOVED = Rule(
    id="pip-global-option-removed",
    stage=Stage.INSTALL,
    title="this installer no longer takes {option|--global-option}",
    fix="steer the build with variables (DS_BUILD_..., MAX_JOBS); build_ext -j was never safe for DeepSpeed",
    steps=(
        step("python -m dsdoctor prebuild --ops cpu_adam"),
        instead("DS_BUILD_CPU_ADAM=1 python -m pip install --no-build-isolation deepspeed"),
    ),
    manual="""The installer no longer takes --global-option, --build-option or --install-option.

pip 25.3 removed them, and uv never had them. Old DeepSpeed recipes use them for `build_ext -j8`;
DS_ENABLE_NINJA=1 with MAX_JOBS gives the same speed.

Why it matters: The installation stops at the option. Where it was still taken, `-j8` made objects of different
ops overwrite each other.""",
    signatures=(
        Signature(
            words="global+option build+option install+option",
            pattern=r"(?:no such option|unexpected argument|unrecognized arguments?|option)[: '\"]+"
            r"(?P<option>--(?:global|build|install)-option)\b(?!.{0,60}deprecat)",
            sample="no such option: --global-option",
        ),
        Signature(
            words="deprecation",
            pattern=r"DEPRECATION: (?P<option>--(?:build-option and --global-option|install-option))",
            tier=Tier.PROBE,
            title="{option} will go with pip 25.3",
            sample="DEPRECATION: --build-option and --global-option are deprecated. pip 25.3 will enforce this "
            "behaviour change.",
        ),
    ),
)


TRITON_PIN_CONFLICT = Rule(
    id="triton-pin-conflict",
    stage=Stage.INSTALL,
    title="triton {wanted|1.0.0} is asked for, and this environment cannot have it",
    fix="leave sparse_attn (and whatever pins that triton) out; torch 2 brings a triton of its own",
    steps=(step("DS_BUILD_SPARSE_ATTN=0 python -m pip install --no-build-isolation deepspeed"),),
    manual="""Something requires a triton that this environment cannot have.

The op sparse_attn pins triton 1.0.0, which exists only for old Pythons and conflicts with every torch 2. The
extra deepspeed[sparse_attn], or all extras, ask for it. Newer DeepSpeeds have dropped the op.

Why it matters: pip finds no version that satisfies everybody, or installs one with which torch does not work.""",
    signatures=(
        Signature(
            words="triton",
            pattern=r"(?:No matching distribution found for|satisfies the requirement) "
            r"triton(?P<wanted>[=<>!~]{1,2}[\w.]+)",
            title="there is no triton{wanted} for this Python",
            sample="ERROR: No matching distribution found for triton==1.0.0",
        ),
        Signature(
            words="triton",
            pattern=r"(?:depends on|requires) triton(?P<wanted>[=<>!~]{1,2}[\w.]+)(?!.{0,60}harmless)",
            tier=Tier.GENERIC,
            title="triton{wanted} is required, and something else wants another",
            sample="torch 2.0.1 requires triton==2.0.0, but you have triton 1.0.0 which is incompatible.",
        ),
        Signature(
            words="triton",
            pattern=r"No module named '(?P<wanted>triton\.[\w.]+)'|cannot import name '\w+' from 'triton|module "
            r"'triton[\w.]*' has no",
            title="this triton lacks {wanted|what DeepSpeed imports from it}",
            sample="ModuleNotFoundError: No module named 'triton.ops'",
        ),
        Signature(
            words="triton",
            pattern=r"using (?:an )?untested triton version|please install triton==(?P<wanted>[\d.]+)",
            tier=Tier.PROBE,
            op="sparse_attn",
            title="an op wants another triton: harmless unless you use sparse_attn",
            sample="[WARNING]  using untested triton version (2.0.0), only 1.0.0 is known to be compatible",
        ),
    ),
)


PYDANTIC_INCOMPATIBLE = Rule(
    id="pydantic-incompatible",
    stage=Stage.INSTALL,
    title="this DeepSpeed and this pydantic do not work together",
    fix="DeepSpeed before 0.14.3 needs pydantic 1, later ones need 2: upgrade DeepSpeed, or pin pydantic",
    steps=(
        step("python -m pip install -U deepspeed"),
        instead("python -m pip install 'pydantic<2'", note="for a DeepSpeed before 0.14.3"),
    ),
    manual="""This release of DeepSpeed and this release of pydantic do not work together.

DeepSpeed's configuration classes are pydantic models. Releases before 0.14.3 were written for pydantic 1, later
ones for pydantic 2, whose names and rules differ.

Why it matters: Importing DeepSpeed fails, or its configuration is refused.""",
    signatures=(
        Signature(
            words="pydanticimporterror pydanticusererror pydanticschemageneration pydanticundefinedannotation",
            pattern=r"pydantic\.(?:errors\.)?\w*Pydantic\w+(?:Error|Annotation)|Pydantic(?:Import|User)Error",
            sample="pydantic.errors.PydanticImportError: `BaseSettings` has been moved to the "
            "`pydantic-settings` package.",
        ),
        Signature(
            words="pydantic pydantic_core",
            pattern=r"(?:cannot import name '\w+' from|No module named|has no attribute .{0,60}in|module) "
            r"'?pydantic(?!_settings)[\w.]*'?",
            unless=r"Collecting|Requirement|UserWarning",
            sample="ImportError: cannot import name 'field_validator' from 'pydantic' "
            "(/venv/lib/python3.10/site-packages/pydantic/"
            "__init__.cpython-310-x86_64-linux-gnu.so)",
        ),
        Signature(
            words="recursive_guard root_validator",
            pattern=r"_evaluate\(\) missing 1 required keyword-only argument: 'recursive_guard'|If you use "
            r"`@root_validator` with pre=False",
            sample="TypeError: ForwardRef._evaluate() missing 1 required keyword-only argument: 'recursive_guard'",
        ),
        Signature(
            words="fieldinfo modelfield __fields_set__ model_fields_set __fields__ model_fields",
            pattern=r"AttributeError: '(?:FieldInfo|ModelField)' object has no attribute"
            r"|has no attribute '(?:__fields_set__|model_fields_set|__fields__|model_fields)'",
            sample="AttributeError: 'FieldInfo' object has no attribute 'required'. Did you mean: 'is_required'?",
        ),
        Signature(
            words="pydantic",
            pattern=r"deepspeed (?P<version>[\d.]\S{0,160}) requires "
            r"pydantic(?P<wanted>[^,]{1,20}(?:,[<>=!][^,]{1,12})?), but you",
            tier=Tier.GENERIC,
            title="deepspeed {version} requires pydantic{wanted}, and another one is here",
            sample="deepspeed 0.9.5 requires pydantic<2.0.0, but you have pydantic 2.5.3 which is incompatible.",
        ),
    ),
)


PYTHON_DEP_MISSING = Rule(
    id="python-dep-missing",
    stage=Stage.INSTALL,
    title="the Python package {module} is not installed",
    fix="install it into the environment that runs or builds DeepSpeed; if it is a part of your own code, start from its "
    "folder, or put that on PYTHONPATH",
    steps=(step("python -m pip install {package}"),),
    manual="""Something imports a Python package that is not in this environment.

Examples are dskernels (of deepspeed-kernels) for cutlass_ops and ragged_device_ops, cpuinfo (of py-cpuinfo) for
the CPU ops, and distutils (of setuptools) since Python 3.12.

Why it matters: The build or the run stops at the import. With pip's `--no-build-isolation` nobody installs the
build requirements for you.""",
    signatures=(
        Signature(
            words="modulenotfounderror importerror+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?\"?(?P<module>[A-Za-z_][\w.]*)",
            unless=r"named '?\"?(?:mpi4py|wheel\b|torch\b|pydantic|triton\.|ninja\b|deepspeed\.ops\.|op_builder"
            r"|deepspeed_\w+|pkg_resources\b)"
            r"|named '?\"?\w+_op\b|named "
            r"'?\"?(?:transformers\.deepspeed|apex|amp_C|apex_C|fused_layer_norm_cuda|flash_attn\w*|megatron"
            r"|fused_weight_gradient_mlp_cuda|transformer_engine\w*)\b",
            tier=Tier.GENERIC,
            sample="ModuleNotFoundError: No module named 'dskernels'",
        ),
        Signature(
            words="modulenotfounderror",
            pattern=r"^ModuleNotFoundError: No module named '?\"?(?P<module>[A-Za-z_][\w.]*)",
            after=r"in find_class$|[Uu]npickler|in _legacy_load$|pickle_module\.load",
            title="the file that is loaded was saved by code of the module {module|of another program}, and Python does "
            "not find that code here",
            fix="run it where the training code can be imported: put its folder on PYTHONPATH, or start from that folder. "
            "pip is no cure, unless the module is a package of PyPI",
            steps=(step('export PYTHONPATH="/path/to/the/training/code:$PYTHONPATH"'),),
            sample='  File "/venv/torch/serialization.py", line 1415, in find_class\n'
            "ModuleNotFoundError: No module named 'REC'",
        ),
        Signature(
            words="npu_accelerator sdaa_accelerator mlu_accelerator supa_accelerator klxpu_accelerator xpu_accelerator",
            pattern=r"Accelerator (?:external )?requires (?P<module>(?:torch|intel)_\w+), which is not installed",
            sample="ValueError: NPU_Accelerator requires torch_npu, which is not installed on this system.",
        ),
        Signature(
            words="deepspeed+installed+pip3 deepspeed+installed+pip deepspeed+available+pip3",
            pattern=r"ImportError: DeepSpeed is not (?:installed|available) => (?:run|install it using) "
            r"`pip3? install (?P<module>deepspeed)`",
            sample="ImportError: DeepSpeed is not installed => run `pip3 install deepspeed` or build it from source.",
        ),
        Signature(
            words="named+pkg_resources",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?\"?(?P<module>pkg_resources)\b",
            tier=Tier.GENERIC,
            title="{module} is imported here, and this environment has none: setuptools 82 and later have none any more, and "
            "without setuptools there is none either",
            fix="install a setuptools below 82 (pip show setuptools says which one there is). Where pip builds in isolation it "
            "takes the newest one for that, so build without isolation then. A newer release of the package that imports it may "
            "do without",
            steps=(
                step("python -m pip show setuptools"),
                step("python -m pip install 'setuptools<82'"),
                step("python -m pip install --no-build-isolation PACKAGE", note="where it was a build that failed"),
            ),
            sample="ModuleNotFoundError: No module named 'pkg_resources'",
        ),
        Signature(
            words="pkg_resources",
            pattern=r"cannot import name '(?P<module>packaging)' from 'pkg_resources'",
            title="this torch takes {module} from setuptools, and newer setuptools have none",
            fix="pin setuptools below 70 for this torch, or upgrade torch",
            steps=(step("python -m pip install 'setuptools<70'"),),
            sample="ImportError: cannot import name 'packaging' from 'pkg_resources' "
            "(/venv/lib/python3.10/site-packages/"
            "pkg_resources/__init__.py)",
        ),
        Signature(
            words="torch+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?\"?(?P<module>torch)'?\"?\s*$",
            not_after=IN_A_BUILD,
            tier=Tier.GENERIC,
            sample="ModuleNotFoundError: No module named 'torch'",
        ),
    ),
)

RULES = (
    WHEEL_PACKAGE_MISSING,
    PIP_GLOBAL_OPTION_REMOVED,
    TRITON_PIN_CONFLICT,
    PYDANTIC_INCOMPATIBLE,
    PYTHON_DEP_MISSING,
)
