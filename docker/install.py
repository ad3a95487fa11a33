"""pip install by sha256: pip says what it would install, that is compared with what was recorded, and then installed as it was.

    python3 install.py [--extra-index-url URL] REQUIREMENT...

Recorded are the sha256 in constraints.txt and torch.sha256 beside this file. A file that differs from those of its name and version
is refused, and nothing is installed. One of which nothing was recorded (another torch, a wheel made in the image) is installed by
the sha256 that its index gives or that it had when it was looked at, and is named. Needs pip 22.2 or newer; an older one installs
as always, and that is said.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RECORDS = ("constraints.txt", "torch.sha256")
PIP = (sys.executable, "-m", "pip")
OLDEST = (22, 2)


def recorded(text: str) -> "dict[str, set[str]]":
    """What was recorded: the sha256 of each ``name==version``, as pip's requirement files write them."""
    found: dict[str, set[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
        if pin:
            found.setdefault(key(pin[1], pin[2]), set()).update(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return {pin: digests for pin, digests in found.items() if digests}


def key(name: str, version: str) -> str:
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"


def planned(arguments: "list[str]", folder: Path) -> "list[dict[str, str]]":
    """What pip would install: for each its pin, its requirement, the name of its file and its sha256, "" where pip has none."""
    report = folder / "report.json"
    subprocess.run([*PIP, "install", "--quiet", "--dry-run", "--report", str(report), *arguments], check=True)
    found = []
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name, version, source = item["metadata"]["name"], item["metadata"]["version"], item["download_info"]
        archive = source.get("archive_info") or {}
        # pip 22 has only the older of the two
        digest = (archive.get("hashes") or {}).get("sha256") or archive.get("hash", "").partition("sha256=")[2]
        requirement = f"{name} @ {source['url']}" if item["is_direct"] else f"{name}=={version}"
        file = source["url"].partition("#")[0].rpartition("/")[2]
        found.append({"pin": key(name, version), "requirement": requirement, "file": file, "sha256": digest})
    return found


def refused(plan: "list[dict[str, str]]", known: "dict[str, set[str]]") -> "list[str]":
    """A line for each file that is another than the one that was recorded."""
    return [
        f"✗ {item['file']} has the sha256 {item['sha256'] or 'that its index does not give'}, "
        f"none of the {len(known[item['pin']])} that were recorded for {item['pin']}\n"
        "    Fix: find out why the index has another file; if it may, add its --hash=sha256:... to docker/constraints.txt"
        for item in plan
        if item["pin"] in known and item["sha256"] not in known[item["pin"]]
    ]


def install(plan: "list[dict[str, str]]", options: "list[str]", folder: Path) -> None:
    """Install just the files of a plan: what comes with another sha256 than a moment ago is refused by pip."""
    hashed = [f"{item['requirement']} --hash=sha256:{item['sha256']}" for item in plan if item["sha256"]]
    others = [item["requirement"] for item in plan if not item["sha256"]]
    # the versions are settled, and pip would want a sha256 for each line of a constraints file
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    for lines, more in ((hashed, ["--require-hashes"]), (others, [])):
        if lines:
            file = folder / "requirements.txt"
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            argv = [*PIP, "install", "--no-deps", *more, *options, "--requirement", str(file)]
            subprocess.run(argv, env=environment, check=True)


def main(arguments: "list[str]") -> None:
    options = arguments[:2] if arguments[0] == "--extra-index-url" else []
    told = subprocess.run([*PIP, "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
    if tuple(map(int, re.findall(r"\d+", told)[:2])) < OLDEST:
        print(f"pip {told} cannot say beforehand what it installs: no sha256 was compared", flush=True)
        subprocess.run([*PIP, "install", *arguments], check=True)
        return
    known = recorded("\n".join((HERE / name).read_text(encoding="utf-8") for name in RECORDS))
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(arguments, Path(folder))
        if wrong := refused(plan, known):
            sys.exit("\n".join(wrong))
        install(plan, options, Path(folder))
    new = [item["pin"] for item in plan if item["pin"] not in known]
    print(f"{len(plan) - len(new)} of {len(plan)} files have the sha256 that was recorded", end="")
    print(f"; nothing was recorded of {', '.join(new)}" if new else "")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
