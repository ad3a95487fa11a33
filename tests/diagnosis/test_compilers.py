"""A compiler's own error is told, whichever compiler wrote it: never that the log only shows consequences."""

from __future__ import annotations

import itertools

from dsdoctor.diagnosis.models import LogOutcome
from tests.diagnosis.reading import diagnose
from tests.each import each

ERRORS = {
    "gcc": "/w/csrc/adam.cpp:41:9: error: 'Tile' was not declared in this scope",
    "nvcc": '/w/csrc/adam.cu(41): error: identifier "Tile" is undefined',
    "numbered": '/w/csrc/adam.cu(41): error #20: identifier "Tile" is undefined',
    "msvc": "C:\\w\\csrc\\adam.cpp(41): error C2065: 'Tile': undeclared identifier",
    "EDG": '"/w/csrc/adam.cu", line 41: error: identifier "Tile" is undefined',
    "EDG, at once": '"/w/csrc/adam.h", line 41: catastrophic error: #error directive: this tile is not for this machine',
    "icc": "icpc: error #10299: problem encountered with this tile",
    "nvc++": "nvc++: error: this tile is not for this machine",
    "hipcc": "hipcc: error: this tile is not for this machine",
}
BUILDS = {
    "jit": (
        [
            "Building extension module fused_adam...",
            "[1/3] nvcc -DTORCH_EXTENSION_NAME=fused_adam -c adam.cu -o adam.o",
            "FAILED: adam.o ",
        ],
        [
            "ninja: build stopped: subcommand failed.",
            "Traceback (most recent call last):",
            '  File "/v/lib/python3.10/site-packages/torch/utils/cpp_extension.py", line 2112, in _run_ninja_build',
            "    raise RuntimeError(message) from e",
            "RuntimeError: Error building extension 'fused_adam'",
        ],
    ),
    "setup": (
        ["building 'deepspeed.ops.adam.fused_adam_op' extension", "gcc -c adam.cpp -o adam.o"],
        ["error: command '/usr/bin/gcc' failed with exit code 1", "ERROR: Failed building wheel for deepspeed"],
    ),
}


@each("compiler", ERRORS)
def test_the_compiler_s_own_error_is_told(compiler: str) -> None:
    for (before, behind), label in itertools.product(BUILDS.values(), ("", "[rank1]: ")):
        log = [f"{label}{line}" for line in (*before, ERRORS[compiler], *behind)]
        told = diagnose(log)

        assert told.outcome is not LogOutcome.ONLY_ECHOES
        assert "tile" in told.findings[0].evidence[0].lower(), told.findings[0]
