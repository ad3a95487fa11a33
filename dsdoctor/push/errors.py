"""What a node or ssh said, or a time limit -> a finding that says why the push stops at that node."""

from dsdoctor.core.finding import Finding, Step, step
from dsdoctor.hosts.remote_step import on_host
from dsdoctor.push.models import NodeEnded, NodeMessage, NodeState, NodeStep, Sent, Way

AGAIN = "fix that and run the same push again: a node that has the wheel already is left as it is"


def failed(host: str, way: Way, message: NodeMessage) -> NodeEnded:
    """A node says that a step failed."""
    if message.say == "differs":
        title = f"the copy of {message.name} has sha256 {message.sha256[:16]}..., which is not that of the file here"
        return _failed("wheel-copy-differs", title, "run the same push again; see whether the node's disk is healthy")
    if message.say == "lacks" and message.name == "pip":
        give = step("{python} -m ensurepip", python=way.python)
        return _failed("node-lacks-pip", f"{way.python} has no pip", "give it one", on_host(host, give))
    if message.say == "lacks":
        title = f"{way.python} finds no dsdoctor, and none is on PATH"
        install = step("{python} -m pip install dsdoctor", python=way.python)
        return _failed("host-lacks-modules", title, "install it there", on_host(host, install))
    if message.say == "another":
        title = f"pip ended well, and what an import takes there is not this wheel: {', '.join(message.names)}"
        fix = "see where the other one comes from (PYTHONPATH, ~/.local)"
        return _failed("node-has-another", title, fix, _what_is_there(host, way))
    if message.step is NodeStep.INSTALL:
        return _failed("node-not-installed", f"it could not be installed: {message.why}", AGAIN)
    if message.step is NodeStep.COPY:
        return _failed("node-took-no-copy", f"the wheel could not be copied: {message.why}", AGAIN)
    return no_verdict(message.why)


def no_verdict(why: str) -> NodeEnded:
    """A node did not say whether the wheel fits."""
    return _failed("node-not-verified", f"nothing is known of the wheel there: {why}", AGAIN)


def shrunk(file: Sent) -> NodeEnded:
    """A file became shorter while it was sent."""
    return _failed("wheel-copy-differs", f"{file.path} was changed while it was sent", "wait until it is written")


def refused_here(error: OSError) -> NodeEnded:
    """This machine did not let us read the wheel or start ssh."""
    return _failed("dsdoctor", f"the system here refused: {error.strerror or error}", AGAIN)


def lost(host: str, way: Way, status: int | None, said: str) -> NodeEnded:
    """ssh ended, or (None) was ended, before the node sent a message."""
    tail = tuple(said.splitlines()[-4:])
    if status in {255, None}:
        return NodeEnded(NodeState.UNREACHABLE, way.unreached(host, status, said))
    title = f"{way.python} does not start there"
    fix = "name the interpreter of the environment there with --python PATH"
    steps = (on_host(host, step("ls -l {python}", python=way.python)),)
    return NodeEnded(NodeState.FAILED, Finding.error("host-lacks-python", title, evidence=tail, fix=fix, steps=steps))


def cut_off(host: str, way: Way, step: NodeStep, why: str, said: str = "") -> NodeEnded:
    """A node was left in the middle of a step."""
    tail = tuple(said.splitlines()[-4:])
    if step is not NodeStep.INSTALL:
        title = f"{why} at the step {step.value}; nothing was installed"
        fix = "run the same push again: a node that has the wheel already is left as it is"
        return NodeEnded(NodeState.FAILED, Finding.error("node-cut-off", title, evidence=tail, fix=fix))
    title = f"{why} while pip was at work, which goes on there by itself"
    steps = (_what_is_there(host, way),)
    fix = "see what is there, then run the same push again"
    return NodeEnded(NodeState.FAILED, Finding.error("node-cut-off", title, evidence=tail, fix=fix, steps=steps))


def folder_left(folder: str) -> Finding:
    """A node could not clean up."""
    title = f"the folder of the copy is still there: {folder}"
    return Finding.warning("node-folder-left", title, fix="remove it by hand")


def _failed(rule: str, title: str, fix: str, *steps: Step) -> NodeEnded:
    return NodeEnded(NodeState.FAILED, Finding.error(rule, title, fix=fix, steps=steps))


def _what_is_there(host: str, way: Way) -> Step:
    return on_host(host, step("{python} -m dsdoctor verify --installed", python=way.python))


MANUAL = {
    "wheel-copy-differs": """\
The file that arrived on a node is not the one that was sent: its sha256, read back there, differs.

Why it matters: nothing was installed there. Network and disk have checksums of their own, so a full or failing disk is
likely, or a new wheel was written to the same place meanwhile.

How to fix it: run the same push again. If it comes again, look at the node's disk; if the file here was changed while
it was sent, wait until it is written.

Since: 0.1""",
    "node-lacks-pip": """\
The interpreter on a node has no pip.

Why it matters: nothing can be installed into its environment. uv makes such environments.

How to fix it: give it a pip.

    $ ssh NODE PYTHON -m ensurepip

Since: 0.1""",
    "node-has-another": """\
pip installed the wheel on a node without complaint, and an import there takes other files.

Every file that the wheel's RECORD lists is compared with what lies where Python finds `deepspeed`.

Why it matters: training on that node would use the other DeepSpeed. An older one in ~/.local, a PYTHONPATH or an
editable checkout is found first.

How to fix it: see where the other DeepSpeed comes from, and remove it or the path that leads to it.

    $ ssh NODE PYTHON -m dsdoctor verify --installed

Since: 0.1""",
    "node-not-installed": """\
pip could not install the wheel on a node, or its disk has no space for it.

Why it matters: the finding holds pip's own error, and the report what is there now: pip puts the old DeepSpeed back
when it fails.

How to fix it: fix what pip reports and run the same push again. A node that has the wheel already is left as it is.

Since: 0.1""",
    "node-took-no-copy": """\
A node could not take the copy of the wheel.

Why it matters: the wheel goes into a private folder below TMPDIR, else /tmp, before it is verified; without it nothing
is installed.

How to fix it: see whether there is space, and whether this user may write there. Then run the same push again.

    $ ssh NODE df -h /tmp

Since: 0.1""",
    "node-not-verified": """\
dsdoctor on a node gave no verdict on the wheel.

Why it matters: the wheel was not installed there, because nothing is known of whether it fits. The finding holds what
dsdoctor said.

How to fix it: see whether dsdoctor works on that node at all, then run the same push again.

    $ ssh NODE PYTHON -m dsdoctor verify --installed

Since: 0.1""",
    "node-cut-off": """\
A push was interrupted, a node did not finish a step within --timeout, or its connection broke.

Why it matters: before pip begins nothing is changed on the node, and its private folder is removed there. A pip that
has begun goes on by itself whatever happens to the push: it can put back what was there when it fails, but not when it
is killed.

How to fix it: see what is there, then run the same push again. A node that has the wheel already is left as it is.

    $ ssh NODE PYTHON -m dsdoctor verify --installed

Since: 0.1""",
    "node-folder-left": """\
A node could not remove the private folder into which the wheel was copied.

Why it matters: nothing uses it any more, but it takes space.

How to fix it: remove it by hand. The finding names it.

    $ ssh NODE rm -r FOLDER

Since: 0.1""",
}
"""The manual pages of these rules, for ``dsdoctor explain``."""
