"""What a start needs two lines for: launchers started together, devices of another maker, a text for a number, DeepCompile."""

from __future__ import annotations

from dsdoctor.core.finding import Finding
from tests.diagnosis.reading import diagnose
from tests.each import each

STEPS = [f"{{'loss': 1.{number}, 'grad_norm': 0.5}}" for number in range(6)]
IN_USE = "The server socket has failed to bind to [::]:29600 (errno: 98 - Address already in use)."
BOUND = f"[W socket.cpp:426] [c10d] {IN_USE}"


def raised(exception: str, *frames: tuple[str, str, str]) -> list[str]:
    """A traceback. ``frames``: path, function, source."""
    told = [line for path, name, source in frames for line in (f'  File "{path}", line 33, in {name}', f"    {source}")]
    return ["Traceback (most recent call last):", *told, exception]


def launched(port: int) -> str:
    """What the launcher prints first."""
    return (
        "[2023-07-10 03:00:04,827] [INFO] [runner.py:555:main] cmd = /v/bin/python -u -m deepspeed.launcher.launch "
        f"--world_info=eyJ --master_addr=127.0.0.1 --master_port={port} --enable_each_rank_log=None main.py"
    )


def first(log: list[str]) -> Finding:
    """The first finding."""
    return diagnose(log).findings[0]


TAKEN = [BOUND, *raised(f"RuntimeError: {IN_USE}", ("main.py", "<module>", "deepspeed.init_distributed()"))]


@each("label", ["", "{n}: ", "[{n}] "])
@each("number", [2, 4, 8])
def test_launchers_started_together_are_told(label: str, number: int) -> None:
    log = [label.format(n=task) + launched(29600) for task in range(number)]
    finding = first([*log, *(label.format(n=1) + line for line in TAKEN)])

    assert f"{number} launchers" in finding.title
    assert "29600" in finding.title
    assert finding.fix
    assert "srun --ntasks-per-node=1" in finding.fix.steps[0].line


@each(
    "log",
    [
        [launched(29600), *TAKEN],
        [launched(29600), *STEPS, "{'train_runtime': 3.0}", launched(29600), *TAKEN],
        [launched(29600), "[launch.py:1:main] Process 3 exits successfully.", launched(29600), *TAKEN],
        [launched(29600), launched(29601), *TAKEN],
    ],
)
def test_one_launcher_or_one_after_the_other_is_none_of_it(log: list[str]) -> None:
    assert first(log).rule == "master-port-in-use"
    assert "29600" in first(log).title


def test_the_commands_are_about_the_port_of_the_log_and_another_one() -> None:
    fix = first(TAKEN).fix

    assert fix
    assert [step.line for step in fix.steps[:2]] == ["ss -ltnp sport = :29600", "deepspeed --master_port 29601 ..."]


REFUSED = raised(
    "RuntimeError: Unable to proceed, no GPU resources available",
    ("/v/site-packages/deepspeed/launcher/runner.py", "main", 'raise RuntimeError("Unable to proceed")'),
)


@each(
    ("line", "extension"),
    [
        (":: initializing oneAPI environment ...", "intel_extension_for_pytorch"),
        ("source /usr/local/Ascend/ascend-toolkit/set_env.sh", "torch_npu"),
        ("| HL-SMI Version: hl-1.2 | hl-smi", "habana_frameworks"),
        ("$ cnmon", "torch_mlu"),
        ("$ /opt/rocm/bin/rocm-smi", "ROCm"),
    ],
)
def test_devices_of_another_maker_are_asked_for_with_its_own_tool(line: str, extension: str) -> None:
    finding = first([line, *REFUSED])

    assert finding.fix
    assert extension in finding.fix.text
    assert not any("nvidia-smi" in step.line for step in finding.fix.steps)


def test_without_such_a_word_nothing_is_said_of_a_maker() -> None:
    assert first(["Using MKL of /opt/intel", *REFUSED]).title == "the launcher sees no GPU"


MISMATCH = "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:"


@each(
    ("here", "there", "texts"),
    [
        ("8", "8", True),
        ("true", "True", True),
        ("1e-5", "1e-05", True),
        ("8.0", "8", True),
        ("16", "32", False),
        ("8", "80", False),
    ],
)
def test_values_that_look_alike_are_of_two_types(here: str, there: str, texts: bool) -> None:
    line = f"- ds optimizer.params.lr={here} vs hf learning_rate={there}"
    finding = first([*raised(MISMATCH, ("/w/t.py", "<module>", "trainer.train()")), line])

    assert finding.rule == "hf-config-mismatch"
    assert ("string in quotes" in finding.title) is texts


def test_packages_that_do_not_fit_are_named() -> None:
    log = raised(
        "TypeError: Accelerator._prepare() takes 2 positional arguments but 4 were given",
        ("/w/t.py", "<module>", "trainer.train()"),
        ("/v/site-packages/transformers/trainer.py", "train", "self.accelerator.prepare(model)"),
        ("/v/site-packages/accelerate/accelerator.py", "prepare", "self._prepare(model, 1, 2)"),
    )
    finding = first(log)

    assert "accelerate makes the call" in finding.title
    assert finding.fix
    assert "accelerate and transformers" in finding.fix.text
    assert finding.fix.steps[0].line == "python -m pip show accelerate transformers"


@each("call", ["_set_master_addr_port()", "DSElasticAgent._set_master_addr_port()"])
@each("label", ["", "worker-0: "])
def test_an_elastic_agent_that_is_too_old_is_known(call: str, label: str) -> None:
    log = raised(
        f"TypeError: {call} takes 3 positional arguments but 4 were given",
        (
            "/v/site-packages/torch/distributed/elastic/agent/server/api.py",
            "_rendezvous",
            "self._set_master_addr_port(",
        ),
    )

    assert first([label + line for line in log]).rule == "deepspeed-too-old-for-torch"


COMPILED = [
    "Traceback (most recent call last):",
    '  File "/w/t.py", line 3, in <module>',
    "    model(x)",
    "torch._dynamo.exc.BackendCompilerFailed: backend='backend_fn' raised:",
    "RuntimeError: SymIntArrayRef expected to contain only concrete integers",
]


@each(
    "line",
    [
        "[INFO] [engine.py:3840:compile] Compiling deepcompile=True backend=inductor",
        "Launching compile passes: global_steps=0 passes=[<function add_z1_reduce at 0x7f2>]",
        '  File "/v/site-packages/deepspeed/compile/backend.py", line 127, in launch',
    ],
)
def test_deepcompile_is_told_from_torch_compile(line: str) -> None:
    finding = first([line, *COMPILED])

    assert "DeepCompile" in finding.title
    assert "depends on the data" in finding.title
    assert finding.fix
    assert finding.fix.text.startswith("set compile.deepcompile false")
    assert "DeepCompile" not in first(COMPILED).title


@each("words", ["ModuleNotFoundError: No module named 'pkg_resources'", "ImportError: No module named pkg_resources"])
@each("label", ["", "#10 5.334   "])
def test_pkg_resources_is_not_mended_by_the_newest_setuptools(words: str, label: str) -> None:
    finding = first([label + line for line in raised(words, ("<string>", "<module>", "import pkg_resources"))])

    assert finding.rule == "python-dep-missing"
    assert finding.fix
    assert "python -m pip install 'setuptools<82'" in [step.line for step in finding.fix.steps]


@each("part", ["accelerator", "ops/csrc", "ops/op_builder"])
def test_a_link_of_deepspeeds_source_that_is_taken_for_a_file_is_told(part: str) -> None:
    said = f"error: can't copy 'deepspeed/{part}': doesn't exist or not a regular file"

    assert "link" in first(["running build_py", said]).title
    assert "a link" not in first(["running build_py", said.replace(part, "other")]).title


@each(
    ("path", "windows"),
    [
        ("C:\\Users\\PC\\AppData\\Local\\Temp\\pip-build-env-kb1\\overlay\\setuptools\\build_meta.py", True),
        ("/tmp/pip-build-env-kb1/overlay/setuptools/build_meta.py", False),
    ],
)
def test_on_windows_nothing_is_advised_that_runs_on_linux_alone(path: str, windows: bool) -> None:
    finding = first(raised("AssertionError: Unable to pre-compile ops without torch installed.", (path, "f", "g()")))

    assert finding.rule == "torch-missing-at-build"
    assert finding.fix
    assert ("set DS_BUILD_OPS=0" in [step.line for step in finding.fix.steps]) is windows
    assert any("dsdoctor" in step.line for step in finding.fix.steps) is not windows


@each(
    ("line", "title"),
    [
        (
            "Successfully installed ninja-1.13.0 pip-26.0 setuptools-82.0.0 wheel-0.46.3",
            "setuptools 82.0.0 is installed",
        ),
        ("setuptools==83.1", "setuptools 83.1 is installed"),
        ("Successfully installed setuptools-69.5.1", "pkg_resources is imported here"),
    ],
)
def test_the_setuptools_of_the_log_decides(line: str, title: str) -> None:
    log = raised(
        "ModuleNotFoundError: No module named 'pkg_resources'", ("<string>", "<module>", "import pkg_resources")
    )

    assert first([line, *log]).title.startswith(title)


@each(
    "module, package",
    [
        ("einops", "einops"),
        ("yaml.nodes", "pyyaml"),
        ("my_company_internal", "PACKAGE"),
        ("utils", "PACKAGE"),
        ("x", "PACKAGE"),
    ],
)
def test_a_log_does_not_choose_what_is_installed(module: str, package: str) -> None:
    finding = first(
        raised(f"ModuleNotFoundError: No module named '{module}'", ("train.py", "<module>", f"import {module}"))
    )

    assert finding.fix
    assert [step.line for step in finding.fix.steps] == [f"python -m pip install {package}"]
    assert module.split(".")[0] in finding.title


@each(
    "line, kept, gone",
    [
        (
            "ImportError: evil-pkg>=0.9.3 is required for a normal functioning of this module, but found evil-pkg==0.8.3.",
            "python -m pip install PACKAGE",
            "evil",
        ),
        (
            "ImportError: accelerate>=1.1.0 is required for a normal functioning of this module, but found accelerate==0.8.3.",
            "python -m pip install 'accelerate>=1.1.0'",
            "evil",
        ),
        ("ERROR: Failed building wheel for evil-pkg", "python -m pip download --no-deps PACKAGE", "evil"),
        ("bash: llamafactory-cli: command not found", "python -m pip install PACKAGE", "install llamafactory"),
        ("ssh: Could not resolve hostname evilhost: Name or service not known", "getent hosts HOST", "evil"),
        (
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (evil, 29500).",
            "getent hosts HOST",
            "evil",
        ),
    ],
)
def test_a_log_names_no_host_and_no_package_in_a_command(line: str, kept: str, gone: str) -> None:
    finding = first([line])

    assert finding.fix
    steps = [step.line for step in finding.fix.steps]
    assert kept in steps
    assert gone not in str(steps)
