"""Recorded machines: what check, plan and env say of them is what a practitioner would say."""

import json
from pathlib import Path

import pytest

from dsdoctor.builder.build import prepare_plan
from dsdoctor.builder.check import check
from dsdoctor.builder.checked import Checked
from dsdoctor.builder.verify import verify
from dsdoctor.checks.compare import differences
from dsdoctor.cli.env import select
from dsdoctor.core.errors import DoctorError, ImpossiblePlan
from dsdoctor.core.finding import Severity
from dsdoctor.core.requests import BuildOrder, CheckRequest
from dsdoctor.core.snapshot import RecordedHost
from dsdoctor.probe.observe import observe, probe_for_build
from tests.machines.make import HERE, LAYOUTS

MACHINES = tuple(sorted(HERE.glob("*.json")))
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "one-toolkit": (set(), set()),
    "several-toolkits": ({"cuda-torch-mismatch"}, set()),
    "conda": ({"cuda-header-missing", "cuda-lib-link-missing"}, set()),
    "debian-package": ({"cuda-torch-mismatch", "host-compiler-too-new"}, set()),
    "pypi-wheels": ({"cuda-header-missing"}, {"accelerator-autodetect-cpu", "arch-list-empty"}),
    # DS_BUILD_FUSED_ADAM=1 pip install deepspeed with torch 2.8.0+cu128 and no GPU; recorded there
    "cpu-flavour": (
        {"cuda-home-wrong", "ops-accelerator-mismatch"},
        {"accelerator-autodetect-cpu", "arch-list-empty"},
    ),
    "wsl": (set(), {"library-path-other-cuda"}),
    "container-without-gpu": ({"cuda-home-wrong"}, {"accelerator-autodetect-cpu", "arch-list-empty"}),
    "hpc-modules": ({"host-compiler-too-old"}, set()),
    "old-driver": ({"driver-too-old", "gpu-not-in-torch", "gpu-arch-unsupported-by-nvcc"}, set()),
    "runtime-image": (set(), set()),
}


def checked(name: str) -> Checked:
    return check(CheckRequest(python="/none", machine=HERE / f"{name}.json"), say=print)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_machine_gets_the_findings_a_practitioner_would_expect(name: str) -> None:
    done = checked(name)

    errors = {finding.rule for finding in done.findings if finding.severity is Severity.ERROR}
    warnings = {finding.rule for finding in done.findings if finding.severity is Severity.WARNING}
    # an error elsewhere makes warnings of what hinders other ops only
    assert errors == EXPECTED[name][0]
    assert warnings - {"libaio-missing", "cuda-lib-link-missing"} == EXPECTED[name][1]


def test_every_snapshot_is_judged_and_every_layout_has_one() -> None:
    names = {path.stem for path in MACHINES}

    assert names == set(EXPECTED)
    assert {make.__name__.replace("_", "-") for make in LAYOUTS} <= names


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_snapshot_holds_nothing_that_it_should_not(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert "/root" not in text
    assert not any(word in text.lower() for word in ("api_key", "_token=", "secret", "password", "/opt/lab"))
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_the_ops_are_judged_too(path: Path) -> None:
    done = checked(path.stem)

    assert len(done.ops) == 23
    assert all(op.because for op in done.ops if op.verdict == "cannot")


def test_the_wrapped_toolkit_is_mended_by_build_wheel() -> None:
    done = checked("container-without-gpu")
    fused_adam = next(op for op in done.ops if op.op == "fused_adam")

    assert (fused_adam.verdict, fused_adam.mended) == ("cannot", "builds")


def test_an_op_that_pip_built_for_the_cpu_is_not_taken_for_the_gpus() -> None:
    done = checked("cpu-flavour")

    (wrong,) = (finding for finding in done.findings if finding.rule == "ops-accelerator-mismatch")
    assert "the CPU variant: fused_adam" in wrong.evidence
    assert next(op for op in done.ops if op.op == "fused_adam").verdict != "installed"


def test_plan_and_env_work_on_a_recorded_machine() -> None:
    order = BuildOrder(python="/none", machine=HERE / "one-toolkit.json")

    with probe_for_build(order) as observing, prepare_plan(order, observing.final()) as ready:
        assert ready.plan.env["CUDA_HOME"] == "/usr/local/cuda"
        assert [op.op for op in ready.plan.ops] == ["cpu_adam", "utils", "fused_adam"]
        assert ready.plan.architectures == ("8.0",)
    settings, _ = select(order)
    assert settings.values["CUDA_HOME"] == "/usr/local/cuda"
    assert settings.prepend["PATH"] == ("/usr/local/cuda/bin",)


def test_a_training_configuration_decides_the_ops_and_says_why(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    order = BuildOrder(python="/none", machine=HERE / "one-toolkit.json", config=config)
    said = {}
    for text in ("optimizer: {\n type: Lion\n}", '{"train_batch_size": 8}'):
        config.write_text(text)
        with probe_for_build(order) as observing, prepare_plan(order, observing.final()) as ready:
            (because,) = (choice.because for choice in ready.plan.choices if choice.what == "ops")
            said[because.partition(": ")[2]] = [op.op for op in ready.plan.ops]

    usual = "nothing in it loads an op on cuda; using the usual set"
    assert said == {"fused_lion for optimizer lion": ["fused_lion"], usual: ["cpu_adam", "utils", "fused_adam"]}


def test_env_names_the_next_command_where_a_toolkit_must_be_assembled() -> None:
    with pytest.raises(ImpossiblePlan, match="can be assembled") as caught:
        select(BuildOrder(python="/none", machine=HERE / "pypi-wheels.json"))

    assert caught.value.hint == "python -m dsdoctor toolkit"


def test_the_installed_deepspeed_of_a_recorded_machine_is_verified() -> None:
    done = verify("/none", HERE / "runtime-image.json", None)

    assert (done.built.told_by, done.findings) == ("manifest", ())
    with pytest.raises(DoctorError, match="DeepSpeed is not installed"):
        verify("/none", HERE / "wsl.json", None)


def test_the_odd_one_out_is_named_first() -> None:
    files = [HERE / f"{name}.json" for name in ("one-toolkit", "several-toolkits", "debian-package", "old-driver")]

    told = {difference.fact: difference.groups for difference in differences(tuple(files))}

    assert told["torch"][0].machines == ("one-toolkit",)
    assert (told["torch"][0].value, told["torch"][1].value) == ("2.8.0+cu128", "2.14.1+cu130")
    assert "Python" not in told


def test_machines_that_do_not_differ(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes((HERE / "wsl.json").read_bytes())

    assert differences((HERE / "wsl.json", other)) == ()


def test_a_snapshot_is_judged_alike_whatever_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = checked("hpc-modules")
    for name, value in {
        "CUDA_HOME": "/x",
        "DS_ACCELERATOR": "cpu",
        "PATH": "/none",
        "TORCH_CUDA_ARCH_LIST": "1",
    }.items():
        monkeypatch.setenv(name, value)

    assert checked("hpc-modules").findings == before.findings


def test_a_snapshot_without_answers_to_our_questions_is_a_machine_without_anything(tmp_path: Path) -> None:
    file = tmp_path / "empty.json"
    file.write_text(json.dumps({"schema": "dsdoctor-snapshot/1", "answers": {"no question of ours": None}}))

    done = check(CheckRequest(python="/none", machine=file), say=print)

    assert "python-silent" in {finding.rule for finding in done.findings}
    assert RecordedHost.load(file).snapshot.source is None
    assert observe("/none", file, whole=False).machine.toolkits == ()
