"""A network namespace that has IPv6 alone, not even 127.0.0.1: what torch is asked before the ranks begin does not hold them up."""

import subprocess
import sys

import pytest

from tests.comm.conftest import need
from tests.comm.rig import missing

pytestmark = pytest.mark.launch
ONLY_IPV6 = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo && exec "$@"'
ASK = "from dsdoctor.comm.control import data_process as one; one._ask_name_server(); print(one.loopback())"


def test_torch_is_not_held_up_where_there_is_no_ipv4() -> None:
    need(missing())
    command = ["unshare", "--net", "sh", "-c", ONLY_IPV6, "sh", sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert (done.returncode, done.stdout) == (0, "::1\n"), done.stderr
