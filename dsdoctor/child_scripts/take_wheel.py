"""Takes a wheel on a node, for the install that started it: copies it into a private folder, has the node's own dsdoctor verify
it, and installs it when told to. Runs nothing of the wheel.

In on stdin: a JSON line, the files' bytes, then "install". Out on stdout: JSON lines behind a mark. When stdin closes, a
signal comes or the time is up, it stops and removes its folder; but a pip that has begun ends by itself, because a pip that is
killed leaves half a DeepSpeed.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from base64 import urlsafe_b64encode

MARK = b"@@dsdoctor "
CHUNK = 1 << 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
PATIENCE = 3600
"""Seconds to wait for the order to install, and the most that pip may take."""
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "ramfs")
LOOK = """
import importlib.util as util, json, os, re, sys, sysconfig
def place(name):
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec and (os.path.dirname(spec.origin) if spec.origin else list(spec.submodule_search_locations)[0])
def version():
    # as the metadata folders are called: importlib.metadata would take most of our time
    names = (name for folder in filter(os.path.isdir, sys.path) for name in sorted(os.listdir(folder)))
    found = (re.match(r"deepspeed-([^-]+?)(?:-py[0-9.]+)?[.](?:dist|egg)-info$", name) for name in names)
    return next((match[1] for match in found if match), None)
names = {name: place(name) for name in ("deepspeed", "dsdoctor", "pip")}
print("DSDOCTOR " + json.dumps({**names, "version": version(), "site": sysconfig.get_path("purelib")}))
"""


class GaveUp(BaseException):
    """The other side is gone, or the time is up."""


class Failed(Exception):
    """A step that did not succeed, with the reason."""


protected = threading.Event()
"""Set while no signal may interrupt: pip at work, the cleaning up."""


def give_up(number, _):
    if not protected.is_set():
        raise GaveUp("the time is up" if number == signal.SIGALRM else "the other side went away")


def say(what, **more):
    # when the other side is gone, the work still has to end well
    with contextlib.suppress(OSError):
        data = MARK + json.dumps({"say": what, **more}).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]


def is_exchanged(place):
    """Whether others than this user and root could put a folder of theirs in the place of one below a folder."""
    place = os.path.realpath(place)
    while True:
        state = os.stat(place)
        # in a folder with the sticky bit nobody renames what is another's
        shared = state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX
        if shared or (state.st_uid not in (0, os.geteuid()) and not is_of_the_host(place, state.st_uid)):
            return True
        if place == os.path.dirname(place):
            return False
        place = os.path.dirname(place)


def is_of_the_host(place, owner):
    """Whether a folder is one of root's on every system, and its owner one that a user namespace does not map."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return owner == int(file.read()) and place in ("/", "/tmp", "/var", "/var/tmp", "/home", "/dev", "/dev/shm")
    except (OSError, ValueError):
        return False


def private_folder():
    """A new folder for the copy, where nobody can exchange it."""
    problem = OSError("others could exchange it in the folders for temporary files; set TMPDIR on the node")
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        try:
            if not is_exchanged(place):
                return tempfile.mkdtemp(prefix="dsdoctor-install-", dir=place)
        except OSError as error:
            problem = error
    raise problem


def remover(folder):
    """Start a process that removes the folder when no process holds the pipe's other end any more, even after a kill."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(write)
        os.read(read, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(read)
    return write


def run(argv, limit, held=()):
    """Status (None: it took too long), stdout and stderr of a command in the private folder."""
    channels = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, cwd=folder, start_new_session=True, pass_fds=held, **channels)
    status = None
    try:
        out, err = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        out, err = end(process)
    except BaseException:
        end(process)
        raise
    return status, out.decode(errors="replace"), err.decode(errors="replace")


def end(process):
    """Ask a process to end, so that it can end its own children; then kill it."""
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            return process.communicate(timeout=seconds)
    return b"", b""


def look():
    """Where the interpreter finds DeepSpeed, dsdoctor and pip, and where it installs."""
    global seen
    status, out, err = run([order["python"], "-c", LOOK], 60)
    line = next((line[9:] for line in out.splitlines() if line.startswith("DSDOCTOR ")), None)
    if line is None:
        raise Failed("%s does not work (status %s): %s" % (order["python"], status, last(err)))
    seen = json.loads(line)
    return seen


def present(found):
    """The DeepSpeed that an import would take; version None: its records are missing."""
    return {"version": found["version"], "location": found["deepspeed"]} if found["deepspeed"] else None


def environment(site):
    """A value that is equal on two nodes when they share the environment.

    A local file system belongs to a single running kernel, so the boot id is part of its value.
    """
    while not os.path.exists(site):
        site = os.path.dirname(site)
    place, real = os.stat(site), os.path.realpath(site)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = [line.split() for line in file]
    around = [m for m in mounts if m[4] == "/" or real == m[4] or real.startswith(m[4] + "/")]
    kind = max(around, key=lambda m: len(m[4]))
    if kind[kind.index("-") + 1] not in LOCAL:
        return ["shared", str(place.st_ino)]
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return ["local", file.read().strip(), str(place.st_dev), str(place.st_ino)]


def take(name, size, sha256):
    """One file from stdin into the folder; what then lies there must be what was sent."""
    path = os.path.join(folder, os.path.basename(name))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while size:
            chunk = sys.stdin.buffer.read(min(size, CHUNK))
            if not chunk:
                raise GaveUp("the other side went away")
            size -= len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    found = digest(path).hexdigest()
    if found != sha256:
        say("differs", name=name, sha256=found)
        raise Failed("the copy of %s is not the file that was sent" % name)


def digest(path):
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            total.update(chunk)
    return total


def verify(found):
    """The verdict of this node's dsdoctor on the wheel."""
    command = [order["python"], "-m", "dsdoctor"] if found["dsdoctor"] else [shutil.which("dsdoctor") or ""]
    if not command[0]:
        say("lacks", name="dsdoctor")
        raise Failed("no dsdoctor")
    other = [] if found["dsdoctor"] else ["--python", order["python"]]
    status, out, err = run([*command, "verify", wheel, *other, "--json"], order["limit"])
    try:
        findings = json.loads(out.replace(folder + "/", ""))["findings"]
    except (ValueError, KeyError, TypeError):
        raise Failed("its dsdoctor gave no verdict (status %s): %s" % (status, last(err))) from None
    if not found["pip"] and not order["dry_run"]:
        say("lacks", name="pip")
        raise Failed("no pip")
    say("verified", status=status, findings=findings, why=last(err))


def differing(root):
    """The files there that are not this wheel's. pip rewrites scripts, which stand in .data folders, and RECORD."""
    with zipfile.ZipFile(wheel) as file:
        (record,) = (name for name in file.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.TextIOWrapper(file.open(record), encoding="utf-8")))
    information = record.split("/")[0]
    others = [name for name in os.listdir(root) if name.startswith("deepspeed-") and name.endswith(".dist-info")]
    wrong = [name for name in others if name != information]
    listed = {row[0]: row[1] for row in rows if len(row) > 1 and row[1].startswith("sha256=")}
    kept = {name: value for name, value in listed.items() if not name.split("/")[0].endswith(".data")}
    return wrong + [name for name, value in kept.items() if value != recorded(os.path.join(root, name))]


def recorded(path):
    """The digest of a file as RECORD writes it."""
    try:
        return "sha256=" + urlsafe_b64encode(digest(path).digest()).rstrip(b"=").decode()
    except OSError:
        return None


def is_there(found):
    """None when what an import takes is this wheel, else what differs."""
    if not found["deepspeed"]:
        return ["no DeepSpeed is found"]
    return differing(os.path.dirname(found["deepspeed"])) or None


def install(found):
    """pip, unless this very wheel is there; a signal or a closed connection does not interrupt it."""
    global seen
    if is_there(found) is None:
        say("installed", already=True)
        return
    with zipfile.ZipFile(wheel) as file:
        needed = sum(entry.file_size for entry in file.infolist())
    free = shutil.disk_usage(found["site"]).free if os.path.isdir(found["site"]) else needed
    if free < needed * 1.1:
        raise Failed("%s has %d MiB free, the wheel unpacks to %d" % (found["site"], free >> 20, needed >> 20))
    seen = None
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--force-reinstall"]
    status, _, err = run([order["python"], "-m", "pip", "install", *options, wheel], PATIENCE, held=(held,))
    if status != 0:
        raise Failed(last(err) if status is not None else "pip did not end within %d s" % PATIENCE)
    wrong = is_there(look())
    if wrong:
        say("another", names=wrong[:6])
        raise Failed("what is installed is not this wheel")
    say("installed", already=False)


def last(text):
    """The line that says why a program failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1][:500]


def listen():
    """Hand the lines of stdin to the main thread; at their end, signal it."""
    text = b""
    while chunk := os.read(0, 4096):
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            commands.put(line)
    os.kill(os.getpid(), signal.SIGHUP)


def work():
    """Copy, verify, wait for the order, install."""
    global step
    found = look()
    say("here", before=present(found), environment=environment(found["site"]), folder=folder)
    step = "copy"
    for file in order["files"]:
        take(**file)
    say("copied")
    threading.Thread(target=listen, daemon=True).start()
    step = "verify"
    verify(found)
    signal.alarm(PATIENCE)
    if commands.get() == b"install":
        step = "install"
        protected.set()
        install(look())


def main():
    """Do the work, then report how it ended, what is there now, and whether the folder is gone."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # only this notices a connection that is dead without having been closed
        signal.alarm(int(2 * order["limit"]) + 60)
        work()
    except (GaveUp, Exception) as error:
        # any error has to be reported to the other side
        protected.set()
        say("failed", step=step, why=str(error)[:1000] or repr(error))
    protected.set()
    try:
        say("end", now=present(seen or look()), asked=True)
    except (Failed, OSError, ValueError):
        say("end", now=None, asked=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        say("removed", left=os.path.exists(folder))


order = json.loads(sys.stdin.buffer.readline())
commands = queue.Queue()
step, seen = "connect", None
for signal_number in SIGNALS:
    signal.signal(signal_number, give_up)
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
try:
    folder = private_folder()
except OSError as problem:
    say("failed", step="copy", why="no folder for the copy can be made: %s" % problem)
    sys.exit(1)
held = remover(folder)
wheel = os.path.join(folder, os.path.basename(order["files"][0]["name"]))
main()
# the interpreter would wait for a thread that still reads stdin
os._exit(0)
