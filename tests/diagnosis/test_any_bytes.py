"""Whatever stands in a log, a Diagnosis comes out, and in time."""

import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import LogOutcome
from dsdoctor.diagnosis.scan import INDEX
from tests.diagnosis.reading import diagnose
from tests.each import each

SAMPLES = [signature.sample.encode() for rule in RULES.values() for signature in rule.signatures]
WORDS = sorted({word.encode() for sample in SAMPLES[:80] for word in sample.decode().split()})
ALL_WORDS = b" ".join(sorted(INDEX.words))
LINES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from(SAMPLES),
    st.lists(st.sampled_from(WORDS), max_size=12).map(b" ".join),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(LINES, max_size=12))
def test_any_lines_give_a_diagnosis(lines: list[bytes]) -> None:
    data = b"\n".join(lines)

    diagnosis = diagnose(raw_lines(io.BytesIO(data)))

    assert (diagnosis.outcome is LogOutcome.EMPTY) is (not data.replace(b"\0", b"").strip())
    assert len({finding.rule for finding in diagnosis.findings}) == len(diagnosis.findings)
    assert diagnosis.lines == len(io.BytesIO(data).readlines())


@settings(max_examples=10, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=8))
def test_any_text_gives_a_diagnosis(lines: list[str]) -> None:
    assert diagnose(lines).lines == len(lines)


HOSTILE = {
    "one line without an end": b"error: cannot find " * 60_000,
    "near-matches of a compiler": b"x.h:1:1: fatal error: cusparse.h cusparse.h: cusparse_h: error: \n" * 1000,
    "long near-matches": (b"The detected CUDA version (11 mismatches " * 90 + b"\n") * 80,
    "colons": (b":1:1: " * 600 + b" cusparse h error\n") * 80,
    "quotes": (b"'" * 3000 + b" named modulenotfounderror cusparse h\n") * 80,
    "an op's name": (b"/torch_extensions/" + b"aaaa/" * 600 + b".so: cannot so\n") * 80,
    "blanks": (b"ld: " + b" " * 3000 + b"-lcurandx lcurand\n") * 80,
    "progress bars": b"\r".join(b"%d%%|###   |" % number for number in range(50_000)),
    "tracebacks": b"Traceback (most recent call last):\n" * 2500,
    "imports without a build": b"ModuleNotFoundError: No module named 'torch'!\n" * 1500,
    "indexes without a list": b"IndexError: list index out of range\n" * 1500,
    "escapes": b"\x1b[" * 100_000,
    "brackets": b"[rank0]:" * 100_000,
    "clocks": b"2026-11-21 08:50:53,123 " * 30_000,
    "nothing but zeros": b"\0" * 500_000,
    "folders of a cache": (b"/torch_extensions/" + b"/a" * 1900 + b" torch_extensions\n") * 80,
    "a user's name": (b"a@" + b"a" * 3900 + b" permission denied\n") * 80,
    "an op's module": (b"No module named deepspeed.ops." + b"a" * 3800 + b" importerror import\n") * 80,
    "a word before Windows": (b"a" * 3900 + b" posix\n") * 80,
    "a word before CUDA_HOME": (b"a" * 3900 + b" cuda_home\n") * 80,
    "a process's number": (b"1" * 3900 + b" killed\n") * 80,
    "names of linkers": (b"lc laio lccl lcudart lcuda lcufile lm " + b"ld: A" * 760 + b"\n") * 80,
    "exceptions that may be wrapped": (b"KeyError: " + ALL_WORDS[:900] + b"\na\nb\nc\n") * 80,
    "the words of everything": (b"KeyError: " + ALL_WORDS + b"a" * 1500 + b"\n") * 60,
    "the words of everything, in states": b"\r".join([b"KeyError: " + ALL_WORDS[:480]] * 8) + b"\n",
    "lines above in vain": (b"KeyError: '9.0' ValueError: too many values to unpack " + b"x" * 250 + b"\n") * 2500,
    "short lines of a traceback": (b"Traceback (most recent call last):\n" + b"a\n" * 399) * 20,
    "short lines of another language": "\n".join(chr(0x4E00 + number) for number in range(5000)).encode(),
}


@each("data", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.slow
def test_no_hostile_log_takes_for_ever(data: bytes) -> None:
    distinct = b"\n".join(line + b" %d" % number for number, line in enumerate(data.split(b"\n")))
    began = time.process_time()

    diagnose(raw_lines(io.BytesIO(distinct)))

    # a net for what grows with the square of a line: minutes, where these take a tenth of a second each
    assert time.process_time() - began < 10


@each("share", [0.5, 1.0])
@pytest.mark.slow
def test_no_pattern_explodes_on_its_own_near_matches(share: float) -> None:
    samples = [sample.split(b"\n")[-1] for sample in SAMPLES]
    lines = [(sample[: int(len(sample) * share)] * 60)[:4000] + sample + b"!" for sample in samples]
    began = time.process_time()

    diagnose(lines)

    # six seconds on an idle machine; one pattern that explodes takes minutes for a single line
    assert time.process_time() - began < 120
