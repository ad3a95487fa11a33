import pytest

from dsdoctor.core.architectures import check_known, parse_architectures
from dsdoctor.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("9.0", ("9.0",)),
        ("8.0;9.0+PTX", ("8.0", "9.0+PTX")),
        ("12.0 8.6", ("8.6", "12.0")),
        ("9.0;9.0+PTX;9.0", ("9.0+PTX",)),
        (" 8.0;  ", ("8.0",)),
    ],
)
def test_lists_as_torch_reads_them(text: str, meant: tuple[str, ...]) -> None:
    assert parse_architectures(text) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9.0a", "suffix"),
        ("10.0f", "suffix"),
        ("sm_90", "nvcc's spelling"),
        ("compute_90", "nvcc's spelling"),
        ("90", "nvcc's spelling"),
        ("8.0,9.0", "comma"),
        ("Hopper", "name"),
        ("ampere+PTX", "name"),
        ("native", "not a compute capability"),
        ("", "empty"),
        (";", "empty"),
        ("$(rm -rf /)", "not a compute capability"),
    ],
)
def test_what_torch_or_deepspeed_would_choke_on_gets_a_sentence(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_architectures(text)

    assert caught.value.hint


def test_an_architecture_that_torch_does_not_know() -> None:
    with pytest.raises(UsageError, match=r"'8.8' is unknown to this torch") as caught:
        check_known(("8.8",), ("8.0", "8.6", "9.0"))

    assert caught.value.hint == "it knows 8.0, 8.6"
