"""Runs a command, and ends its whole session and all it started when dsdoctor is gone, however it went: FD COMMAND [ARGUMENT...].

FD is the reading end of a pipe whose writing end dsdoctor alone holds: it closes with dsdoctor, after kill -9 too. (A signal at
the parent's death, PR_SET_PDEATHSIG, would end the compiler's driver and leave the compilers that it started.)
The exit status, or the signal, is the command's own.
"""

import os
import resource
import signal
import sys
import threading


def parent_and_session(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[1]), int(fields[3])
    except (OSError, ValueError, IndexError):
        return None


def members():
    """All of this session, and what was started from it and went into a session of its own, as a compiler's launcher may."""
    about = {int(name): parent_and_session(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    about = {pid: facts for pid, facts in about.items() if facts is not None}
    found, ours = {os.getpid()}, os.getsid(0)
    while True:
        more = {pid for pid, facts in about.items() if facts[1] == ours or facts[0] in found} - found
        if not more:
            return found - {os.getpid()}
        found |= more


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def end_all_at_eof(pipe):
    os.read(pipe, 1)
    stopped = set()
    # a member may be forking just now: stopped it cannot, and while its parent lives it is known whose it is
    for _ in range(20):
        more = members() - stopped
        if not more:
            break
        send(more, signal.SIGSTOP)
        stopped |= more
    send(stopped, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


pipe, argv = int(sys.argv[1]), sys.argv[2:]
child = os.fork()
if not child:
    os.close(pipe)
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (argv[0], error.strerror))
        os._exit(127)
threading.Thread(target=end_all_at_eof, args=(pipe,), daemon=True).start()
_, status = os.waitpid(child, 0)
if os.WIFSIGNALED(status):
    # the command has written its core already, where there is one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
