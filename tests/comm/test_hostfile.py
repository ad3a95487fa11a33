"""Hostfile and .deepspeed_env, read more strictly than DeepSpeed does, and held against its own parser."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.hosts.hostfile import Hostfile, Slots, parse_deepspeed_env, parse_hostfile

NAME = st.text("az09-", max_size=8).map(lambda rest: f"n{rest}")
NEAR = st.lists(
    st.sampled_from(["n1", "n2", " ", "\t", "slots=", "2", "0", "x", "#", "\n", "\r\n", "\x0b", "=", "n[1-2]", "٣"]),
    max_size=12,
).map("".join)


def problems(text: str) -> list[tuple[int, bool, str]]:
    return [(complaint.line, complaint.refused, complaint.what) for complaint in parse_hostfile(text).complaints]


@pytest.mark.parametrize(
    ("line", "refused", "what"),
    [
        ("n1 slots = 2", True, 'not of the form "HOST slots=NUMBER"'),
        ("n1:2", True, 'not of the form "HOST slots=NUMBER"'),
        ("n1 slots=2x", False, "what follows slots=2 is ignored: 'x'"),
        ("n1 slots=2 max_slots=4", False, "what follows slots=2 is ignored: 'max_slots=4'"),
        ("n1 slots=0", False, "no rank starts on a host with slots=0, but it may still become the master"),
        (
            "n[1-3] slots=2",
            False,
            "'n[1-3]' is not a valid host name: pdsh expands it to several hosts, but DeepSpeed's rank table has one",
        ),
        ("-oProxyCommand=x slots=2", False, "'-oProxyCommand=x' is not a valid host name: ssh reads it as an option"),
    ],
)
def test_a_line_that_deepspeed_refuses_or_swallows_is_named(line: str, refused: bool, what: str) -> None:
    assert problems(f"# ours\n\n{line}\n") == [(3, refused, what)]


def test_a_good_hostfile_has_hosts_and_no_complaint() -> None:
    text = "# ours\nnode1 slots=8\r\n\n  me@node2\tslots=4 # the old one\n"

    assert parse_hostfile(text) == Hostfile(
        hosts=(Slots(name="node1", slots=8, line=2), Slots(name="me@node2", slots=4, line=4))
    )


def test_a_host_named_again_and_an_empty_file_are_refused() -> None:
    assert problems("n1 slots=2\nn1 slots=4") == [(2, True, "n1 is already on line 1")]
    assert problems("# nothing\n") == [(0, True, "no host in it")]


@given(st.dictionaries(NAME, st.integers(1, 64), min_size=1, max_size=5))
def test_what_is_printed_is_read_back(hosts: dict[str, int]) -> None:
    read = parse_hostfile("".join(f"{name} slots={slots}\n" for name, slots in hosts.items()))

    assert ({host.name: host.slots for host in read.hosts}, read.complaints) == (hosts, ())


@given(st.one_of(st.text(), NEAR))
def test_any_text_gives_hosts_or_complaints(text: str) -> None:
    read = parse_hostfile(text)

    assert read.hosts or read.complaints
    parse_deepspeed_env(text)


@pytest.mark.launch
@given(NEAR)
def test_deepspeeds_own_parser_refuses_and_takes_what_we_say(text: str) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    read = parse_hostfile(text)

    try:
        taken = dict(_parse_hostfile(io.StringIO(text, newline=None).readlines()))
    except ValueError:
        assert any(complaint.refused for complaint in read.complaints)
    else:
        assert (taken, any(complaint.refused for complaint in read.complaints)) == (
            {h.name: h.slots for h in read.hosts},
            False,
        )


@pytest.mark.parametrize(
    ("line", "refused", "what"),
    [
        ("", True, "an empty line"),
        ("# ours", True, "a comment"),
        ("NCCL_DEBUG", True, 'no "=" in it'),
        ("export A=1", False, '"export " becomes part of the name'),
        ("# A=1", False, "a comment with an = in it is exported, and its # cuts off the rest of the remote command"),
        ('A="x y"', False, "double quotes end the quotes that DeepSpeed puts around the value"),
        ("A='x y'", False, "single quotes become part of the value"),
        ("A=1 # why", False, "a comment after the value becomes part of it"),
        ("A=$(date)", False, "the remote shell runs the command in the value"),
        ("B=0", False, "B is set twice; the last one counts"),
    ],
)
def test_a_line_of_deepspeed_env_that_arrives_otherwise_is_named(line: str, refused: bool, what: str) -> None:
    read = parse_deepspeed_env(f"B=x\n{line}\n")

    assert [(complaint.line, complaint.refused, complaint.what) for complaint in read.complaints] == [
        (2, refused, what)
    ]


def test_a_complaint_does_not_show_the_value() -> None:
    assert "s3cret" not in str(parse_deepspeed_env("HF_TOKEN='s3cret'\ns3cret\n").complaints)


def test_plain_lines_are_taken_with_what_stands_behind_the_first_equals_sign() -> None:
    read = parse_deepspeed_env("NCCL_SOCKET_IFNAME==eth0\nA = two words\n")

    assert (read.values, read.complaints) == ({"NCCL_SOCKET_IFNAME": "=eth0", "A": "two words"}, ())
