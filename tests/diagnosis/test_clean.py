"""What stands before the words, and between them, is taken away; the words stay."""

import io

from dsdoctor.diagnosis.lines import LONGEST, clean, raw_lines, segments
from tests.each import each

SAID = "RuntimeError: Error building extension 'cpu_adam'"


@each(
    "prefix",
    [
        "",
        "[rank0]: ",
        "[rank12]:",
        "[default3]:",
        "[Rank 0]: ",
        "0: ",
        "12: ",
        "[1,3]<stderr>:",
        "node1: ",
        "worker-07.cluster: ",
        "#12 3.456 ",
        "#7 120.9       ",
        "2026-11-21T08:50:53.1234567Z ",
        "2026-11-21 08:50:53,123 ",
        "[2026-11-21 08:50:53,123] ",
        "      ",
        "\x1b[31m",
        "\x1b[0;31m\x1b[1m",
        "node2: [rank1]: ",
        "2026-11-21T08:50:53.123Z [rank1]: \x1b[31m",
        "\ufeff",
        "(RayTrainWorker pid=4711, ip=10.0.0.1) ",
        "trainer_1  | ",
        "Nov 21 08:50:53 node1 python[4711]: ",
        "E       ",
        "##[error]",
        "> ",
        "│ ",
        "08:50:53 ",
        "2024-01-01 10:00:00.123 | ERROR    | __main__:<module>:12 - ",
        "[trainer-0] ",
        "10.0.0.3: ",
        "stderr: ",
    ],
)
def test_prefixes_go(prefix: str) -> None:
    assert clean(prefix + SAID).lstrip("\ufeff") == SAID


@each(
    "text",
    [
        "[1/3] c++ -MMD -MF cpu_adam.o.d",
        "cpu_adam.cpp:12:10: fatal error: libaio.h: No such file or directory",
        "nvcc fatal   : Unsupported gpu architecture 'compute_90'",
        "LINK : fatal error LNK1181: cannot open input file 'aio.lib'",
        "ssh: connect to host worker-1 port 22: Connection refused",
        "error: command 'gcc' failed with exit status 1",
        "libcudart.so.12: cannot open shared object file: No such file or directory",
    ],
)
def test_what_is_no_prefix_stays(text: str) -> None:
    assert clean(text) == text


def test_colours_go_even_where_a_paste_lost_the_escape_character() -> None:
    assert clean("\x1b[93m [WARNING] \x1b[0m async_io") == clean("[93m [WARNING] [0m async_io")


def test_a_progress_bar_is_a_line_of_its_own() -> None:
    assert segments(b"Loading:  50%|##\rLoading: 100%|####\rRuntimeError: no\n")[-1] == "RuntimeError: no"


def test_sixteen_bit_text_of_windows_is_read() -> None:
    assert segments("RuntimeError: no\r".encode("utf-16-le")) == ["RuntimeError: no"]


def test_broken_bytes_do_no_harm() -> None:
    assert segments(b"fatal error: \xff\xfe cusparse.h\n") == ["fatal error: \ufffd\ufffd cusparse.h"]


def test_a_line_without_an_end_is_cut_and_the_next_one_is_whole() -> None:
    lines = list(raw_lines(io.BytesIO(b"x" * 1_000_000 + b" tail\nnext\nlast")))

    assert [len(line) <= 2 * LONGEST + 1 for line in lines] == [True, True, True]
    assert lines[0].startswith(b"xxx")
    assert lines[0].endswith(b" tail\n")
    assert lines[1:] == [b"next\n", b"last"]


def test_the_lines_of_a_file_keep_their_numbers() -> None:
    assert list(raw_lines(io.BytesIO(b"a\n\nb\r\n"))) == [b"a\n", b"\n", b"b\r\n"]
