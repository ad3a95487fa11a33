"""Compilers, system, libraries, torch and DeepSpeed of small machines."""

import sys
from pathlib import Path

from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Compiler, Cuda, DeepSpeed, Gap, Library, Torch
from dsdoctor.probe import probe
from dsdoctor.probe.paths import find_compilers, find_libraries
from dsdoctor.probe.python import Environment, ask_python, ask_torch, read_deepspeed, read_torch
from dsdoctor.probe.system import ask_gpus, memory_limit, read_system, steering_variables
from tests.conftest import PYTHON, Disk


def gxx(version: str) -> str:
    return f'#!/bin/sh\ncase "$1" in --version) echo "g++ (Debian {version}-1) {version}" ;;\n*) echo /usr/lib/cc1plus ;; esac\n'


def test_every_compiler_with_a_back_end_is_found_once(disk: Disk) -> None:
    host = disk(
        {
            "/usr/bin/g++-12": gxx("12.2.0"),
            "/usr/bin/gcc-12": "#!/bin/sh\n",
            "/usr/bin/gcc": "#!/bin/sh\n",
            "/usr/bin/g++-11": gxx("11.4.0"),
            "/usr/bin/g++-9": "#!/bin/sh\ncase $1 in --version) echo 'g++ (D) 9.1.0';; *) echo cc1plus;; esac\n",
            "/usr/bin/clang-14": "#!/bin/sh\n",
            "/usr/bin/clang++-14": "#!/bin/sh\necho 'Debian clang version 14.0.6'\n",
        },
        links={"/usr/bin/g++": "g++-12"},
        PATH="/usr/bin",
    )

    assert find_compilers(host) == (
        Compiler(path="/usr/bin/g++", c_path="/usr/bin/gcc", kind="gcc", version=(12, 2, 0), found_via="path"),
        Compiler(
            path="/usr/bin/clang++-14", c_path="/usr/bin/clang-14", kind="clang", version=(14, 0, 6), found_via="path"
        ),
        Compiler(path="/usr/bin/g++-11", c_path=None, kind="gcc", version=(11, 4, 0), found_via="path"),
    )


def test_cxx_is_met_first(disk: Disk) -> None:
    host = disk({"/usr/bin/g++": gxx("12.2.0"), "/opt/g++-14": gxx("14.1.0")}, PATH="/usr/bin", CXX="/opt/g++-14")

    assert [(c.path, c.found_via) for c in find_compilers(host)] == [
        ("/opt/g++-14", "cxx_variable"),
        ("/usr/bin/g++", "path"),
    ]


def test_memory_is_what_the_control_groups_leave(disk: Disk) -> None:
    meminfo = {"/proc/meminfo": "MemTotal: 8388608 kB\n"}
    v2 = {"/proc/self/cgroup": "0::/job/step\n", "/sys/fs/cgroup/job/memory.max": "2147483648\n"}
    v1 = {
        "/proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
        "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1073741824\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }

    assert memory_limit(disk(meminfo)) == 8 << 30
    assert memory_limit(disk(meminfo | v2)) == 2 << 30
    assert memory_limit(disk(meminfo | v1)) == 1 << 30


def test_a_machine_without_proc_still_answers(disk: Disk) -> None:
    system = read_system(disk({}), None, "/cache")

    assert (system.memory, system.glibc, system.ninja) == (None, None, None)
    assert system.cpus >= 1


def test_processors_are_what_the_quota_leaves(disk: Disk) -> None:
    host = disk({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"})

    assert read_system(host, None, "/cache").cpus == 1


def test_only_variables_that_steer_a_build_are_read() -> None:
    host = LocalHost(
        env={"DS_BUILD_OPS": "1", "CUDA_HOME": "/x", "CC": "gcc", "AWS_SECRET": "hush", "DS_API_KEY": "hush"}
    )

    assert steering_variables(host) == {"DS_BUILD_OPS": "1", "CUDA_HOME": "/x", "CC": "gcc"}


def test_a_library_without_its_header_is_not_usable(disk: Disk) -> None:
    found = find_libraries(disk({"/usr/lib/x86_64-linux-gnu/libaio.so": ""}), None)

    assert found == (Library(name="libaio", library="/usr/lib/x86_64-linux-gnu/libaio.so"),)
    assert not found[0].usable


def test_torch_is_read_from_its_files(disk: Disk) -> None:
    host = disk(
        {
            "/site/torch/version.py": "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            "/site/torch/include/ATen/ATen.h": "#if !defined(_MSC_VER) && __cplusplus < 202002L\n",
        }
    )

    assert read_torch(host, "/site/torch") == Torch(
        version="2.14.1+cu130", location="/site/torch", cuda=Cuda(13, 0), cxx_standard=20
    )


def test_a_torch_that_crashes_on_import_still_has_a_version(disk: Disk, tmp_path: Path) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    host = LocalHost(env={})
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    environment = Environment(
        python=PYTHON.__class__(**{**PYTHON.__dict__, "executable": str(crashing)}), torch=str(tmp_path / "torch")
    )

    torch = ask_torch(host, environment, whole=False)

    assert isinstance(torch, Torch)
    assert (torch.version, torch.broken) == ("2.13.0+cpu", "the child process was ended by signal 11 (SIGSEGV)")


def test_deepspeed_is_read_and_never_imported(disk: Disk) -> None:
    record = (
        "version='0.19.8+cu13.0.torch2.14'\ninstalled_ops={'cpu_adam': 1, 'utils': False}\naccelerator_name='cuda'\n"
        "torch_info={'version': '2.14', 'cuda_version': '13.0'}\nraise SystemExit('imported')\n"
    )
    host = disk({"/site/deepspeed/git_version_info_installed.py": record})

    assert read_deepspeed(host, Environment(python=PYTHON, deepspeed="/site/deepspeed")) == DeepSpeed(
        version="0.19.8+cu13.0.torch2.14",
        location="/site/deepspeed",
        accelerator="cuda",
        torch="2.14",
        cuda="13.0",
        installed_ops=("cpu_adam",),
        present_ops=(),
    )


def test_this_very_python_is_asked() -> None:
    environment = ask_python(LocalHost(), sys.executable)

    assert isinstance(environment, Environment)
    assert environment.python.version == ".".join(map(str, sys.version_info[:3]))
    assert "pip" in environment.python.packages or environment.python.packages


def test_a_python_that_is_none_is_a_gap() -> None:
    answer = ask_python(LocalHost(), "/no/python")

    assert isinstance(answer, Gap)
    assert "No such file" in answer.reason


def test_no_driver_is_no_gpu_and_no_gap() -> None:
    answer = ask_gpus(LocalHost())

    assert not isinstance(answer, Gap)


def test_an_empty_machine_is_probed_to_the_end(disk: Disk) -> None:
    machine = probe(disk({}), python="/usr/bin/python3", cache="/cache")

    assert (machine.torch, machine.toolkits, machine.compilers) == (None, (), ())
    assert [gap.question for gap in machine.gaps] == ["python /usr/bin/python3"]
