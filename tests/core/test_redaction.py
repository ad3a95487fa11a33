"""What of a variable, a flag and an address is shown: the harmless, whole; nothing else."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.checks.gpus import ACCELERATORS
from dsdoctor.core.architectures import KNOWN, NAMED
from dsdoctor.core.host import LocalHost
from dsdoctor.core.redaction import WORDS, Hidden, RedactingHost, command, flags, index_url, url, urls, variable
from dsdoctor.core.snapshot import RecordedHost, Recorder, Snapshot, save
from dsdoctor.probe.paths import include_dirs
from tests.conftest import Disk
from tests.each import each
from tests.planted import (
    ADDRESSES,
    COMMANDS,
    EVERY,
    FOLDERS,
    HARMLESS,
    IN_ADDRESSES,
    IN_FLAGS,
    IN_PATHS,
    WORDINGS,
    after_harmless,
    plant,
    plant_alone,
    token,
)

HARMLESS_FLAGS = (
    "-O2 -g -DNDEBUG -march=nocona -mtune=haswell -ftree-vectorize -fPIC -fstack-protector-strong -pipe -isystem /e/include",
    "-Wl,-O2 -Wl,--sort-common -Wl,--as-needed -Wl,-z,relro -Wl,-z,now -Wl,-rpath,/e/lib -Wl,-rpath-link,/e/lib -L/e/lib -lcudart",
    "-g -O2 -ffile-prefix-map=/b/x=. -flto=auto -ffat-lto-objects -Wformat -Werror=format-security -D_FORTIFY_SOURCE=2",
    "-Wl,-Bsymbolic-functions -Wno-unused-variable -std=c++17 -std=gnu++20 -fopenmp -fuse-ld=lld -m64 -mavx512f -mno-avx512vnni",
    "-gencode arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=[sm_90a,compute_90a] -arch=sm_90 --threads 4 -t8 -lineinfo",
    "-Xcompiler -fPIC -Xcompiler=-O3,-fopenmp -ccbin /usr/bin/g++-12 --use_fast_math -allow-unsupported-compiler",
    "-I/opt/py=3.11,a+b@1/include -I /opt/x -L /opt/y -B/opt/z --sysroot=/e -I$CONDA_PREFIX/include -I../include -pthread",
    "-D_GLIBCXX_USE_CXX11_ABI=0 -DNDEBUG -D_GNU_SOURCE",
    "",
)


@each("wording", WORDINGS)
def test_no_wording_of_a_token_survives_in_any_variable(wording: str) -> None:
    secret = token(7)
    for name in EVERY:
        value = after_harmless(name, WORDINGS[wording].format(secret))
        shown = variable(name, value)

        assert secret not in shown, (name, value, shown)
        assert variable(name, shown) == shown
        assert shown.startswith(HARMLESS.get(name, "")) or (name in FOLDERS and "://" in value)


@each("wording", IN_ADDRESSES)
def test_an_address_keeps_its_scheme_host_and_path_alone(wording: str) -> None:
    secret = token(7)
    text = IN_ADDRESSES[wording].format(secret)

    assert all(secret not in variable(name, text) for name in ADDRESSES)
    assert secret not in urls(f"pip could not fetch {text}, and {text!r}")


@each(
    ("text", "shown"),
    [
        ("https://u:p@SECRET@h/", "https://h/"),
        ("https://h/simple/", "https://h/simple/"),
        ("HTTPS://U:P@Host:8443/a/b", "HTTPS://Host:8443/a/b"),
        ("git+https://me:pw@github.com/o/DeepSpeed.git@v0.19.8", "git+https://github.com/o/DeepSpeed.git@v0.19.8"),
        ("git+ssh://git@github.com/o/DeepSpeed.git", "git+ssh://github.com/o/DeepSpeed.git"),
        ("file:///opt/wheels/", "file:///opt/wheels/"),
        ("http://u:p@[fe80::1%eth0]:8080/x", "http://[fe80::1%eth0]:8080/x"),
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
        ("https://u:p/w@h/x", "https://..."),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert (url(text), url(shown)) == (shown, shown)


@each("text", HARMLESS_FLAGS)
def test_the_flags_of_distributions_and_of_nvcc_are_shown_whole(text: str) -> None:
    assert flags(text) == text


@each(
    ("text", "shown"),
    [
        ("-DA=1 -DB", "(2 words not shown)"),
        ("-O2 -DA=1", "-O2 (1 more word not shown)"),
        ("-O2 (1 more word not shown) -DB", "-O2 (6 more words not shown)"),
        ("-I/a -D 'X=a b' -L/b", "-I/a -L/b (2 more words not shown)"),
        ("-gencode arch=secret -isystem a=b -O3", "-O3 (4 more words not shown)"),
    ],
)
def test_what_is_not_known_is_counted(text: str, shown: str) -> None:
    assert flags(text) == shown


@each(
    "text",
    [
        "gcc",
        "g++-12",
        "/opt/gcc@13/bin/g++",
        "/opt/py=3.11/bin/g++",
        "ccache clang++ -m64",
        "x86_64-conda-linux-gnu-c++",
        "",
    ],
)
def test_a_compiler_is_shown(text: str) -> None:
    assert command(text) == text


def test_what_changes_a_verdict_is_shown_as_it_is() -> None:
    shown = {
        "TORCH_CUDA_ARCH_LIST": (*KNOWN, *NAMED, "8.0;9.0+PTX", "8.0,9.0", "sm_90", "9.0a", "Hoper", "native"),
        "DS_ACCELERATOR": (*ACCELERATORS, "cudaa"),
        "CUDA_VISIBLE_DEVICES": (
            "",
            "0,1",
            "-1",
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6",
        ),
        "DS_BUILD_OPS": ("", "1", "0", " 1"),
        "PIP_NO_BUILD_ISOLATION": ("0", "false", "off", "True"),
        "CUDA_HOME": ("/usr/local/cuda-13.0", "/a:/b", "~/cuda", ""),
        "MAX_JOBS": ("4",),
    }

    assert {name: tuple(variable(name, value) for value in values) for name, values in shown.items()} == shown
    assert set(ACCELERATORS) <= set(WORDS)


@given(st.text(max_size=60), st.sampled_from((*EVERY, *ADDRESSES)))
def test_what_was_redacted_once_stays(text: str, name: str) -> None:
    shown = variable(name, text)

    assert variable(name, shown) == shown


@each("wording", IN_PATHS.values(), ids=tuple(IN_PATHS))
def test_a_token_in_a_path_is_shown_nowhere(wording: str) -> None:
    here = plant_alone((*COMMANDS, *FOLDERS, "SOME_TOOL_HOME", "OTHER_ROOT", *ADDRESSES), wording)

    shown = {name: variable(name, value) for name, value in here.env.items()}

    assert here.found_in(str(shown)) == []
    assert here.found_in(Hidden(here.env).out_of(f"no such folder: {here.env}")) == []
    assert {name: variable(name, value) for name, value in shown.items()} == shown


@each(
    "folder",
    [
        "/data/hf_datasets",
        "/home/me/hf_home2",
        "~/sk-learn",
        "/x/sk-learn-experiments-2024/cuda",
        "/m/hf_Llama2Checkpoints7B",
        "/srv/pypi-mirror-of-the-whole-company-cache",
        "/opt/ghost_in_the_shell",
        "/x/AKIAB",
        "/a/npm_modules",
    ],
)
def test_folders_whose_names_begin_like_a_token_are_shown(folder: str) -> None:
    assert variable("CUDA_HOME", folder) == folder


@each(
    "secret",
    [
        "hf_" + "aB3" * 12,
        "ghp_" + "aB3" * 12,
        "github_pat_11A" + "b" * 30,
        "glpat-" + "aB3" * 8,
        "sk-ant-" + "aB3-" * 10,
        "AKIA" + "A1B2" * 4,
        "xoxb-1234567890-abc",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_1",
    ],
)
def test_tokens_of_others_are_found_in_paths_and_texts(secret: str) -> None:
    for text in (f"/srv/{secret}/x", f"fetch {secret}", f"-I/opt/{secret}"):
        for name in ("CUDA_HOME", "CXX", "CFLAGS", "PIP_INDEX_URL", "ANY_ROOT"):
            assert secret not in variable(name, text)


@each("wording", ["/x/token={}/lib", "/tmp/key={}", "/opt/api_key={}/a", "/a:/b/My-Secret={}:/c", "~/password={}"])
def test_a_folder_that_names_itself_a_secret_is_shown_without_it(wording: str) -> None:
    secret = "S3cr3tZq9PwXy77"
    text = wording.format(secret)

    for name in ("LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "CUDA_HOME", "CXX", "CFLAGS", "PIP_INDEX_URL"):
        assert secret not in variable(name, text)
        assert secret not in variable(name, f"-I{text}")
    assert variable("ANY_ROOT", text) == wording.format("...") == variable("ANY_ROOT", variable("ANY_ROOT", text))
    assert secret not in Hidden({"LD_LIBRARY_PATH": text}).out_of(f"no {text}, {secret}")
    assert secret not in urls(f"no such file: {text}")


@each(
    "folder",
    [
        "AbCdEf0123456789",
        "9f86d081884c7d659a2feaa0c55ad015",
        "gAAAAABk1234567890abcdef",
        "pypi-AgEIcHlwaS5vcmcCJDEyMzQ",
        "3f2b1c9e-8f4a-4e0c-9b1a-aabbccddeeff",
    ],
)
def test_a_token_on_the_way_to_an_index_is_not_shown(folder: str) -> None:
    address = f"https://dl.example/basic/{folder}/org/python/simple/"

    assert index_url(address) == "https://dl.example/basic/.../org/python/simple/"
    assert folder not in variable("PIP_INDEX_URL", address) + variable("UV_EXTRA_INDEX_URL", f"https://h/x {address}")
    assert folder not in Hidden({"PIP_INDEX_URL": address}).out_of(f"looking in {address}")


@each(
    "address",
    [
        "https://download.pytorch.org/whl/nightly/cu128/",
        f"https://files.pythonhosted.org/packages/ab/cd/{'0a' * 30}/deepspeed-0.19.8.tar.gz",
        "https://github.com/o/r/releases/download/v0.19.8/deepspeed-0.19.8+cu12.8.torch2.9-cp311-cp311-linux_x86_64.whl",
        "http://127.0.0.1:3141/root/pypi/+simple/",
    ],
)
def test_the_address_of_an_index_is_shown(address: str) -> None:
    assert index_url(address) == variable("PIP_INDEX_URL", address) == address


def test_the_words_of_flags_are_found_in_other_texts() -> None:
    planted = plant(("CFLAGS", "NVCC_APPEND_FLAGS"), IN_FLAGS)
    pip = plant(ADDRESSES, IN_ADDRESSES)
    hidden = Hidden(planted.env | pip.env)

    for value in (*planted.env.values(), *pip.env.values()):
        text = f"nvcc fatal : unknown option in '{value}', {value.split()}"
        assert (planted.found_in(hidden.out_of(text)), pip.found_in(hidden.out_of(text))) == ([], [])
    assert (
        hidden.out_of("g++ -O2 -I/opt/x a.cpp: error: KEY is no type")
        == "g++ -O2 -I/opt/x a.cpp: error: KEY is no type"
    )


def test_paths_and_the_name_of_who_works_here_stay_in_other_texts() -> None:
    env = {
        "CFLAGS": "-DROOT=/home/ubuntu/project",
        "http_proxy": "http://ubuntu:hunter22@proxy:3128",
        "HOME": "/home/ubuntu",
    }
    text = "/home/ubuntu/project/csrc/a.cpp: error: no"

    assert Hidden(env).out_of(text) == text
    assert Hidden(env).out_of("-DROOT=/home/ubuntu/project by hunter22") == "... by ..."


def test_a_short_secret_is_hidden_in_a_command() -> None:
    hidden = Hidden({"CFLAGS": "-O2 -DX=ab '-DY=c d'", "CC": "gcc -DZ=1"})

    assert hidden.out_of_words(("gcc", "-O2", "-DX=ab", "-DY=c d", "-DZ=1", "a.c")) == (
        "gcc",
        "-O2",
        "...",
        "...",
        "...",
        "a.c",
    )


def test_a_redacting_host_hides_what_a_failing_command_quotes_and_leaves_answers_whole(disk: Disk) -> None:
    script = '#!/bin/sh\necho "$NVCC_APPEND_FLAGS"; echo "unknown $NVCC_APPEND_FLAGS" >&2; exit $1\n'
    host = RedactingHost(
        disk({"/bin/nvcc": script}, PATH="/bin", NVCC_APPEND_FLAGS="--token=hf_S3cret9", DS_BUILD_X="hush")
    )

    failed, done = (host.run(["/bin/nvcc", status], timeout=5) for status in "10")

    assert (failed.stdout, failed.stderr) == ("...\n", "unknown ...\n")
    assert (done.stdout, done.stderr) == ("--token=hf_S3cret9\n", "unknown ...\n")
    assert (host.variable("NVCC_APPEND_FLAGS"), host.variables("DS_")) == ("(1 word not shown)", {"DS_BUILD_X": "..."})


def test_a_snapshot_holds_no_planted_token_and_folders_still_count(disk: Disk, tmp_path: Path) -> None:
    one_of_each_kind = ("CFLAGS", "NVCC_APPEND_FLAGS", "CC", "CUDA_HOME", "DS_BUILD_STRING", "DS_ACCELERATOR")
    planted = plant(one_of_each_kind, WORDINGS)
    recorder = Recorder(disk({}, **planted.env))
    for name in one_of_each_kind:
        recorder.variable(name)
    for prefix in ("DS_BUILD_", "NVCC_"):
        recorder.variables(prefix)
    folders = include_dirs(recorder)
    save(recorder.snapshot, tmp_path / "machine.json", home="/none")

    assert planted.found_in((tmp_path / "machine.json").read_text()) == []
    assert "/opt/x" in folders


def test_what_the_loader_and_the_c_library_quote_of_a_variable_is_hidden() -> None:
    environment = {
        "LD_PRELOAD": "--password S3cr3tZq9084",
        "LC_ALL": "x S3cr3tA1b2C3",
        "PYTHONWARNINGS": "S3cr3tZq9059",
    }
    hidden = Hidden(environment | {"LANG": "en_US.UTF-8", "LD_LIBRARY_PATH": "/opt/lib64:/usr/lib"})

    assert hidden.out_of(
        "object 'S3cr3tZq9084' from LD_PRELOAD; LC_ALL (x S3cr3tA1b2C3), Invalid -W: S3cr3tZq9059"
    ) == ("object '...' from LD_PRELOAD; LC_ALL (x ...), Invalid -W: ...")
    assert hidden.out_of("en_US.UTF-8 /opt/lib64/libc.so.6") == "en_US.UTF-8 /opt/lib64/libc.so.6"


def test_a_snapshot_of_no_processor_is_one_of_one() -> None:
    assert [RecordedHost(Snapshot(answers={"cpus": number})).cpus() for number in (-1, 0, 3)] == [1, 1, 3]


@each("name", ["CUDA_HOME", "CUDAToolkit_ROOT", "CXX"])
def test_a_question_is_asked_with_the_real_folder_and_only_its_answer_is_redacted(name: str, tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 12
    real = tmp_path / token / name
    (real / "bin").mkdir(parents=True)
    (real / "bin" / "nvcc").write_text("#!/bin/sh\nhome=${0%/bin/nvcc}; echo 12.8 at $home; echo lost $home >&2\n")
    (real / "bin" / "nvcc").chmod(0o755)
    value = f"{real}/bin/nvcc -DX=y" if name == "CXX" else str(real)
    shown = f"{tmp_path}/.../{name}"
    recorder = Recorder(LocalHost(env={name: value, "PATH": "/usr/bin:/bin"}))

    assert (recorder.variable(name) or "").startswith(shown)
    nvcc = f"{shown}/bin/nvcc"
    assert recorder.exists(nvcc)
    assert (recorder.read(nvcc) or "").startswith("#!")
    assert recorder.glob(f"{shown}/bin/*") == (nvcc,)
    assert recorder.resolve(nvcc) == nvcc
    answer = recorder.run([nvcc], timeout=20)
    assert (answer.stdout, answer.stderr) == (f"12.8 at {shown}\n", f"lost {shown}\n")
    save(recorder.snapshot, tmp_path / "machine.json", home="/none")
    kept = (tmp_path / "machine.json").read_text()
    assert (nvcc in kept, token in kept) == (True, False)
