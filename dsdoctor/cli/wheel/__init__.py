"""The group of commands about finished wheels."""

from cyclopts import App

from dsdoctor.cli.statuses import OF_GROUP, statuses_line, statuses_of

app = App(
    name="wheel",
    version_flags=[],
    help_epilogue=OF_GROUP,
    help="""Verify a DeepSpeed wheel, pick one that fits, or index many.

    Nothing in a wheel is run, except by verify --load.

    dsdoctor wheel verify dist/deepspeed-*.whl

    dsdoctor wheel pick /srv/wheels --op fused_adam

    dsdoctor wheel index public dist-0 dist-1 dist-2
    """,
)
for _name in ("verify", "pick", "index"):
    app.command(
        f"dsdoctor.cli.wheel.{_name}:{_name}_command",
        name=_name,
        version_flags=[],
        help_epilogue=statuses_line(statuses_of(f"wheel {_name}")),
    )
