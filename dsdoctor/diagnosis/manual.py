"""The manual pages of verdicts on a log that no rule of the catalogue gives. How they read: ``core.manual``."""

PAGES = {
    "empty-log": """The log holds nothing, or nothing but blank lines.

It is of a program that hangs, or its output went elsewhere.

Why it matters: Without the program's own words no cause can be named.

How to fix it: Record the output of the whole command, stderr too. A program that hangs and prints nothing often
waits for a lock in ~/.cache/torch_extensions.

    $ COMMAND 2>&1 | tee build.log
    $ python -m dsdoctor diagnose build.log

Since: 0.1""",
    "line-partly-searched": """A line of the log is so long that only its head and its tail were searched for known problems.

That is so for lines of more than 4000 characters, and for shorter ones that have words of very many rules, as real lines have not.

Why it matters: What stands in the middle of such a line may be the cause.

How to fix it: Break the lines up, or read what stands in their middle.

    $ fold -s -w 1000 build.log | python -m dsdoctor diagnose -

Since: 0.1""",
    "reader-failed": """dsdoctor itself failed at a line of the log, or when it judged the whole.

The finding shows the line and dsdoctor's own exception. All other lines were read, and the other findings are of them.

Why it matters: The line that could not be read may be the one with the cause.

How to fix it: Read the log around that line, and report it with the exception.

    $ python -m dsdoctor diagnose --json LOG

Since: 0.2""",
    "script-raised": """The script's own code raised an exception on purpose: its words are the cause.

The finding shows the exception, the line of the script, the rank on which it began and the step before it. What the
other ranks print after that (closed connections, timeouts) only follows.

Why it matters: No package has to be mended or built anew. One rank's data or state is other than the script expects.

How to fix it: Look at the values at that line on that rank.

    $ python -m dsdoctor diagnose -v LOG

Since: 0.1""",
    "died-by-signal": """A process was ended by a signal, and the log does not say why.

-6 or 134 (SIGABRT): the program itself broke off, by an assertion in C++, std::terminate or NCCL's watchdog. -7 or 135
(SIGBUS): a page could not be had, most often /dev/shm is full. -9 or 137 (SIGKILL): the kernel or the container ran out
of memory, or somebody killed it. -11 or 139 (SIGSEGV): native code used memory that is not its own. -15 or 143
(SIGTERM): the launcher, the scheduler or somebody asked it to end.

Why it matters: Such a process leaves no Python traceback, and the other ranks only report that it is gone.

How to fix it: Let Python print where it was, keep what each rank prints, and ask the kernel.

    $ export PYTHONFAULTHANDLER=1
    $ torchrun --tee 3 --log-dir logs ...
    $ dmesg -T | grep -i -E 'killed process|out of memory|segfault|xid'

Since: 0.1""",
    "ended-without-words": """A process ended with an exit code such as 1, and none of its own words are in the log.

Its error stream went elsewhere, or the script ended itself by sys.exit() or os._exit().

Why it matters: What the other ranks print only follows; the cause is in what this process printed.

How to fix it: Keep what each rank prints. `@record` of torch.distributed.elastic around main() also writes the traceback
to the error_file that torchrun's summary names.

    $ torchrun --tee 3 --log-dir logs ...

Since: 0.1""",
    "ended-from-outside": """Somebody or something stopped the whole run: Ctrl-C, a scheduler's time limit or preemption, a kill.

Why it matters: Nothing in the run failed by itself, so nothing has to be mended in it.

How to fix it: Ask the scheduler for its record of the job; save checkpoints often enough to go on from.

    $ sacct -j JOB --format=JobID,State,ExitCode,Elapsed,Timelimit

Since: 0.1""",
    "losses-are-nan": """The losses, or the gradient norms, became nan at some step and stayed so to the end of the log.

Why it matters: From that step on nothing is learned, and checkpoints saved later hold nan.

How to fix it: Go back to a checkpoint before that step, and find where the first inf or nan arises. In fp16 try bf16,
else a lower learning rate.

    $ python -m dsdoctor.run SCRIPT.py

Since: 0.1""",
    "log-cut-off": """The log stops in the middle of something: a traceback, a progress bar, a JSON document.

The process still runs, was killed without a word, or hangs; or the end of its output was lost.

Why it matters: The line with the cause, or the good end, is not in this log, so nothing can be said of either.

How to fix it: Give the log to its end, with the error stream of every rank. If the run hangs, ask where it stands.

    $ py-spy dump --pid PID

Since: 0.1""",
    "log-undecided": """The log shows neither a failure that ended the run nor that it is well.

It is a fragment without an end or progress, a piece of a traceback without its exception, or an error after which too little is
printed to tell whether the run went on. A log is healthy only where it shows an end (a summary of the training, "Successfully
installed", exit code 0) or progress (steps, losses, compiled files).

Why it matters: That nothing is known against a log does not make the run healthy.

How to fix it: Give the log to its end, with stderr and the exit code of the command.

    $ COMMAND > run.log 2>&1; echo "exit code: $?" >> run.log
    $ python -m dsdoctor diagnose run.log

Since: 0.2""",
    "unexplained-failure": """The log shows a failure that no rule explains.

The finding shows the first exception's own words, the place in your own files, and a question whose answer would help.

Why it matters: The cause has to be found by reading the log from that line on.

How to fix it: Read the log from the line in the finding; what the machine looks like may help.

    $ python -m dsdoctor check
    $ python -m dsdoctor look

Since: 0.1""",
}
