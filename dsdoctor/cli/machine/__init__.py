"""The group of commands about machines as facts: shown, saved, compared."""

from cyclopts import App

from dsdoctor.cli.statuses import OF_GROUP, statuses_line, statuses_of

app = App(
    name="machine",
    version_flags=[],
    help_epilogue=OF_GROUP,
    help="""Show this machine, save it to a file, or compare such files.

    check, env, wheel and build-wheel --dry-run read such a file with --machine,
    on any machine.

    dsdoctor machine look

    dsdoctor machine record node1.json

    dsdoctor machine compare node1.json node2.json
    """,
)
for _name in ("look", "record", "compare"):
    app.command(
        f"dsdoctor.cli.machine.{_name}:{_name}_command",
        name=_name,
        version_flags=[],
        help_epilogue=statuses_line(statuses_of(f"machine {_name}")),
    )
