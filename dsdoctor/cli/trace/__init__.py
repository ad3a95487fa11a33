"""The group of commands that read traces."""

from cyclopts import App

from dsdoctor.cli.statuses import OF_GROUP, statuses_line, statuses_of
from dsdoctor.cli.trace.compare import compare_command
from dsdoctor.cli.trace.plot import plot_command
from dsdoctor.cli.trace.show import show_command

app = App(
    name="trace",
    version_flags=[],
    help_epilogue=OF_GROUP,
    help="""Inspect the traces of a run: each module's values by batch.

    dsdoctor.watch(engine, level="trace", ...) writes one file per rank:
    dsdoctor-trace/trace-rank00000.jsonl and so on. In place of a file you can
    pass a folder: all traces in it are read. Traces of a job that crashed, or
    is still running, are read as far as they go. A batch is one call of the
    whole model; batches are numbered from 0.

    dsdoctor trace show dsdoctor-trace --batch 150 --bad | head

    dsdoctor trace compare dsdoctor-trace --batch-a 149 --batch-b 150

    dsdoctor trace compare bf16/ fp32/

    dsdoctor trace plot bf16/ fp32/ -o runs.html

    dsdoctor trace show dsdoctor-trace --headroom float16
    """,
)
app.command(show_command, name="show", help_epilogue=statuses_line(statuses_of("trace show")))
app.command(compare_command, name="compare", help_epilogue=statuses_line(statuses_of("trace compare")))
app.command(plot_command, name="plot", help_epilogue=statuses_line(statuses_of("trace plot")))
