"""PreflightFacts -> findings about the hostfile, .deepspeed_env and the variables that are not forwarded. Looks at nothing."""

from collections.abc import Iterator

from dsdoctor.comm.preflight.facts import PreflightFacts
from dsdoctor.core.finding import Finding, step

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
OF_ACCELERATORS = {"cuda": ("NCCL",)}
"""What DeepSpeed 0.19.8 forwards: EXPORT_ENVS of runner.py, and export_envs() of the accelerator."""

NO_HOST = "is no host name"
"""The complaint that ssh can do nothing with: nobody is asked at such a name."""


def hostfile_line_wrong(facts: PreflightFacts) -> Iterator[Finding]:
    """DeepSpeed stops at a line of the hostfile, or accepts it without a warning and does not take it as it is written.

    Its parser reads `HOST slots=NUMBER` at the beginning of a line and drops the rest: `slots=2x` is 2, `slots=8
    max_slots=4` is 8, `slots=0` is a host on which nothing starts. It does not check names: pdsh makes several hosts of
    `n[1-3]`, while DeepSpeed's table of ranks has a single one.

    Why it matters: the launcher ends before any rank is started, or the job starts with other hosts or another number of
    ranks than the file seems to say.

    How to fix it: write one line for each host as it is meant, without spaces around the equals sign: `node1 slots=8`.

    Since: 0.2
    """
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is not None:
            continue
        what, line = complaint.what, f", line {complaint.line}:" if complaint.line else ""
        if complaint.refused:
            what = f"{complaint.text!r} is {what}" if line else f"has {what}"
        end = ": DeepSpeed stops at it" if complaint.refused else "; DeepSpeed takes the line without a warning"
        yield (Finding.error if complaint.refused or NO_HOST in complaint.what else Finding.warning)(
            "hostfile-line-wrong",
            f"{facts.hostfile}{line} {what}{end}",
            evidence=() if complaint.refused else (complaint.text,),
            fix="write one line for each host as it is meant, as in: node1 slots=8",
        )


def host_named_twice(facts: PreflightFacts) -> Iterator[Finding]:
    """One machine is in the hostfile twice, by the same name or by two names.

    Two names count as one machine where hostname and addresses are equal.

    Why it matters: DeepSpeed stops at a name that is there twice, and does not notice two names of one machine. Those
    start two sets of ranks on the same GPUs: NCCL then says "Duplicate GPU detected", or memory runs out.

    How to fix it: keep one line for each host.

    Since: 0.1
    """
    for complaint in facts.hosts.complaints if facts.hosts else ():
        if complaint.host is not None:
            title = f"{facts.hostfile}, line {complaint.line}: {complaint.what}, and DeepSpeed stops at it"
            yield Finding.error(
                "host-named-twice", title, evidence=(complaint.text,), fix="keep one line for each host"
            )
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for visit in facts.visits:
        first = seen.setdefault((visit.hostname, visit.addresses), visit.host)
        if visit.addresses and first != visit.host:
            title = f"{first} and {visit.host} in {facts.hostfile} are one machine ({visit.hostname})"
            yield Finding.error(
                "host-named-twice", title, evidence=(" ".join(visit.addresses),), fix="keep one line for each host"
            )


def variable_not_forwarded(facts: PreflightFacts) -> Iterator[Finding]:
    """Variables that steer communication are set here, and DeepSpeed's launcher does not forward them to the other hosts.

    It forwards names that begin with MLFLOW, PYTHON, MV2 and UCX, and NCCL with GPUs; not GLOO_*, TORCH_*,
    LD_LIBRARY_PATH or DEEPSPEED_TIMEOUT. What a .deepspeed_env (in the home or working directory) sets is forwarded.
    `dsdoctor comm` itself forwards all of them.

    Why it matters: the ranks then differ. Those here use the interface that was named, the others a different one.

    How to fix it: write what the other hosts need into .deepspeed_env in the folder that you start from.

        $ env | grep ^NAME= >> .deepspeed_env

    Since: 0.1
    """
    if not facts.hosts or len(facts.hosts.hosts) < 2:
        return
    forwarded = EXPORTED + OF_ACCELERATORS.get(facts.accelerator, ())
    written = {name for file in facts.environment for name in file.names}
    left = [name for name in facts.set_here if not name.startswith(forwarded) and name not in written]
    if left:
        verb = "is" if len(left) == 1 else "are"
        title = f"{', '.join(left)} {verb} set here, and DeepSpeed's launcher forwards only {'*, '.join(forwarded)}*"
        steps = (step("env | grep ^{variable}= >> .deepspeed_env", variable=name) for name in left)
        fix = "write what the other hosts need into .deepspeed_env of the folder that you start from"
        yield Finding.warning("variable-not-forwarded", title, fix=fix, steps=steps)


def deepspeed_env_malformed(facts: PreflightFacts) -> Iterator[Finding]:
    """A line of .deepspeed_env stops DeepSpeed's launcher, or arrives on the other hosts as something else.

    Why it matters: the file knows NAME=VALUE and nothing else: no comment, no empty line, no `export`, no quotes.
    DeepSpeed puts a value with other characters than letters, digits and _@%+=:,./- between double quotes, and a remote
    shell reads it.

    How to fix it: write plain lines, as in `GLOO_SOCKET_IFNAME=eth0`. Look at the line that the finding names.

        $ sed -n LINEp .deepspeed_env

    Since: 0.1
    """
    for file in facts.environment:
        for complaint in file.complaints:
            end = "DeepSpeed stops at it" if complaint.refused else "it is not forwarded as it is written"
            title = f"{file.path}, line {complaint.line}: {complaint.what}, and {end}"
            evidence = (complaint.text,) if complaint.text else ()
            fix = "write plain lines, as in: GLOO_SOCKET_IFNAME=eth0"
            show = step("sed -n {line} {file}", line=f"{complaint.line}p", file=file.path)
            yield (Finding.error if complaint.refused else Finding.warning)(
                "deepspeed-env-malformed", title, evidence=evidence, fix=fix, steps=(show,)
            )


CHECKS = (
    *(hostfile_line_wrong, host_named_twice),
    *(variable_not_forwarded, deepspeed_env_malformed),
)
