"""Runs a command, and ends its whole session when dsdoctor is gone, however it went: FD COMMAND [ARGUMENT...].

FD is the reading end of a pipe whose writing end dsdoctor alone holds: it closes with dsdoctor, after kill -9 too. (A signal at
the parent's death, PR_SET_PDEATHSIG, would end the compiler's driver and leave the compilers that it started.)
The exit status, or the signal, is the command's own.
"""

import os
import resource
import signal
import sys
import threading


def session_of(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


def end_session_at_eof(pipe):
    os.read(pipe, 1)
    ours = os.getsid(0)
    # a member may be forking just now: look until nobody is left
    for _ in range(20):
        members = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        members = [pid for pid in members if session_of(pid) == ours]
        if not members:
            break
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
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
threading.Thread(target=end_session_at_eof, args=(pipe,), daemon=True).start()
_, status = os.waitpid(child, 0)
if os.WIFSIGNALED(status):
    # the command has written its core already, where there is one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
