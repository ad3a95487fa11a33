"""Python.h out of a package, with shell scripts that play apt-get and dpkg-deb."""

from pathlib import Path

import pytest

from dsdoctor.builder.toolkit.debian import unpack_headers
from dsdoctor.core.build_models import HeadersPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost

APT = '#!/bin/sh\n[ "$1" = download ] && touch "$3_1.deb" && echo fetched >> "$COUNT"\n'
DPKG = '#!/bin/sh\nmkdir -p "$3/usr/include/python3.11" && touch "$3/usr/include/python3.11/Python.h"\n'


def host(tmp_path: Path, apt: str, dpkg: str = DPKG) -> LocalHost:
    for name, text in {"apt-get": apt, "dpkg-deb": dpkg}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return LocalHost(env={"PATH": f"{tmp_path}:/usr/bin:/bin", "COUNT": str(tmp_path / "count")})


def plan(tmp_path: Path) -> HeadersPlan:
    root = tmp_path / "cache" / "headers" / "python3.11.2"
    return HeadersPlan(package="libpython3.11-dev", root=str(root), include=(f"{root}/usr/include/python3.11",))


@pytest.fixture(autouse=True)
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_package_is_fetched_and_unpacked_once(tmp_path: Path) -> None:
    unpack_headers(host(tmp_path, APT), plan(tmp_path))
    unpack_headers(host(tmp_path, APT), plan(tmp_path))

    assert (Path(plan(tmp_path).include[0]) / "Python.h").is_file()
    assert (tmp_path / "count").read_text() == "fetched\n"
    assert not list(Path(plan(tmp_path).root).glob("*.deb"))


@pytest.mark.parametrize(
    ("apt", "dpkg"), [("#!/bin/sh\necho 'E: no such package' >&2; exit 100", DPKG), (APT, "#!/bin/sh\nexit 2")]
)
def test_what_fails_leaves_nothing_and_names_the_command(apt: str, dpkg: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="apt-get could not fetch") as caught:
        unpack_headers(host(tmp_path, apt, dpkg), plan(tmp_path))

    assert "apt-get install libpython3.11-dev" in caught.value.hint
    assert [path.suffix for path in Path(plan(tmp_path).root).parent.iterdir()] == [".lock"]
