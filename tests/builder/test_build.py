"""What the hall adds to a build that failed: the diagnosis of its logs."""

from pathlib import Path

from dsdoctor.builder.build import explained
from dsdoctor.core.build_models import BuildResult, OpResult
from dsdoctor.diagnosis.diagnose import diagnose

MISSING = "x.cu:3:10: fatal error: cusparse.h: No such file or directory\nninja: build stopped: subcommand failed.\n"


def failed(folder: Path, *ops: str) -> BuildResult:
    results = []
    for op in ops:
        log = folder / f"{op}.log"
        log.write_text(MISSING)
        results.append(OpResult(op=op, asked=True, built=False, because="it failed", log=str(log)))
    return BuildResult(wheel=None, manifest=None, ops=tuple(results), seconds=1, cpu_seconds=1, log=str(folder))


def test_a_failed_build_ends_in_the_diagnosis_of_its_logs(tmp_path: Path) -> None:
    [finding] = explained(failed(tmp_path, "fused_adam", "fused_lamb")).findings

    [alone] = diagnose(MISSING.splitlines()).findings
    assert (finding.rule, finding.title, finding.fix) == ("cuda-header-missing", alone.title, alone.fix)
    assert finding.affects == ("fused_adam", "fused_lamb")
    assert f"in {tmp_path}/fused_lamb.log" in finding.evidence


def test_a_build_that_succeeded_is_left_alone(tmp_path: Path) -> None:
    built = BuildResult(
        wheel="w", manifest="m", ops=(OpResult(op="a", asked=True, built=True),), seconds=1, cpu_seconds=1, log="l"
    )

    assert explained(built) == built
