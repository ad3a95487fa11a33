"""Rules of several hosts: the hostfile, ssh between them, filters of hosts and slots."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

HOSTFILE_MALFORMED = Rule(
    id="hostfile-malformed",
    stage=Stage.LAUNCH,
    title="the hostfile cannot be used{entry_hint}",
    fix='write one line a host, "name slots=N", each host once, no blanks around "="',
    steps=(step("printf 'node1 slots=8\\nnode2 slots=8\\n' > hostfile"), step("deepspeed --hostfile hostfile ...")),
    manual="""The hostfile cannot be used.

A hostfile has one line for each host: `node1 slots=8`. Blanks around `=`, `node1:8`, a host twice or an empty
file are refused.

Why it matters: The launcher stops. A hostfile that does not exist is only a warning, and then one node trains
alone.""",
    signatures=(
        Signature(
            words="hostfile",
            pattern=r"Hostfile contains (?:a bad entry: (?P<entry>.{1,80}?)|multiple entries for "
            r"(?P<entry2>\S{1,160}?)|duplicate hosts), ?(?:unable|$)?"
            r"|Hostfile is (?:empty or )?not formatted correctly|no extra nodes available via hostfile",
            sample="ValueError: Hostfile contains a bad entry: worker-1 slots = 8, unable to proceed with launching",
        ),
        Signature(
            words="hostname+hostfile",
            pattern=r"Hostname '(?P<entry>[^']{0,80})' not found in hostfile",
            after=r"Unable to find hostfile",
            title="there is no hostfile where the launcher looks, so {entry} is not in it",
            fix="name the hostfile (default: /job/hostfile), or drop --include and --exclude on one node",
            steps=(step("deepspeed --hostfile PATH ..."),),
            sample="[WARNING] [runner.py:214:fetch_hostfile] Unable to find hostfile, will proceed with training with "
            "local resources only.\nValueError: Hostname 'worker-1' not found in hostfile",
        ),
        Signature(
            words="hosts+hostfile",
            pattern=r"No hosts found in (?P<entry>\S{0,160}hostfile\S{0,40})",
            title="no host was found in {entry}",
            sample="AssertionError: No hosts found in /job/hostfile",
        ),
        Signature(
            words="host+defined",
            pattern=r"Error: host (?P<entry>\S{1,160}) is already defined",
            sample="ValueError: host worker-1 is already defined",
        ),
        Signature(
            words="unpack+expected",
            pattern=r"ValueError: not enough values to unpack \(expected 2, got 1\)",
            after=r"in fetch_hostfile|# fetch_hostfile",
            sample="    hostname, slots = line.split()  # fetch_hostfile\nValueError: not enough values to "
            "unpack (expected 2, got 1)",
        ),
        Signature(
            words="hostfile",
            pattern=r"Bad hostfile text: (?P<entry>.{1,80})",
            tier=Tier.GENERIC,
            sample="[ERROR] [runner.py:300:fetch_hostfile] Bad hostfile text: ['worker-1\\n']",
        ),
    ),
)

SSH_UNREACHABLE = Rule(
    id="ssh-unreachable",
    stage=Stage.LAUNCH,
    title="{host|a host of the hostfile} cannot be reached by ssh without a password",
    fix="let the launching node log in to every host (itself too) with a key; on one node remove the hostfile",
    steps=(
        step("ssh -o BatchMode=yes -o ConnectTimeout=5 {host|HOST} true"),
        step("ssh-copy-id {host|HOST}"),
        step("python -m dsdoctor comm"),
    ),
    manual="""A host of the hostfile cannot be reached by ssh without a password.

The launcher starts the other nodes by ssh, without a terminal: a password, an unknown host key, a firewall or a
name that does not resolve stops it. Inside containers sshd must run, on the port that ssh uses.

Why it matters: The job does not start on all nodes, and DeepSpeed hides what ssh printed.""",
    signatures=(
        Signature(
            words="ssh",
            pattern=r"Using hostfile at .{1,200} but host=(?P<host>[\w.:-]+) was not reachable via ssh",
            sample="RuntimeError: Using hostfile at /job/hostfile but host=worker-1 was not reachable via ssh. "
            "If you are running with a single "
            "node please remove /job/hostfile or setup passwordless ssh.",
        ),
        Signature(
            words="permission+denied",
            pattern=r"(?:(?<![\w.-])(?P<user>[\w.-]{1,100})@(?P<host>[\w.:-]{1,200}): )?"
            r"Permission denied \((?:publickey|password|gssapi|keyboard)|Permission denied, please try again",
            title="{host|the host} refuses the login: no key of this node is known there",
            sample="root@worker-1: Permission denied (publickey,password).",
        ),
        Signature(
            words="rcmd",
            pattern=r"(?<![\w.-])(?P<host>[\w.-]{1,200}): rcmd: \w{1,40}: Permission denied",
            title="pdsh starts the nodes by rsh (rcmd) and not by ssh: {host|a host} refuses it",
            fix="have pdsh use ssh",
            steps=(step("export PDSH_RCMD_TYPE=ssh"), instead("deepspeed --launcher openmpi --hostfile HOSTFILE ...")),
            sample="pdsh@hpc-n1: hpc-n2: rcmd: socket: Permission denied",
        ),
        Signature(
            words="key+verification identification+changed",
            pattern=r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
            title="the host's key is unknown to this node, or has changed",
            fix="accept the hosts' keys once, on every node",
            steps=(step("ssh-keyscan -H {host|HOST} >> ~/.ssh/known_hosts"),),
            sample="Host key verification failed.",
        ),
        Signature(
            words="ssh",
            pattern=r"ssh: connect to host (?P<host>[\w.:-]+) port (?P<port>\d+): (?P<why>[^\r\n]{1,80})",
            title="ssh to {host}, port {port}: {why}",
            sample="ssh: connect to host worker-1 port 22: Connection refused",
        ),
        Signature(
            words="ssh+resolve",
            pattern=r"ssh: Could not resolve hostname (?P<host>[\w.-]+)",
            title="the name {host} of the hostfile does not resolve on this node",
            steps=(step("getent hosts {host}"),),
            sample="ssh: Could not resolve hostname worker-9: Name or service not known",
        ),
        Signature(
            words="ssh+hostname",
            pattern=r"Command '(?:\[')?ssh .{0,100}?(?<![\w.:-])"
            r"(?P<host>[\w.:-]{1,80}) hostname(?: -I)?'(?:\]')? returned non-zero",
            sample="subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no worker-1 "
            "hostname' returned "
            "non-zero exit status 255.",
        ),
        Signature(
            words="suitable",
            pattern=r"Unable to detect suitable master address via",
            title="the launcher could not ask the first host for its address by ssh",
            sample="RuntimeError: Unable to detect suitable master address via `hostname -I`, please manually "
            "specify one via --master_addr",
        ),
        Signature(
            words="pdsh",
            pattern=r"pdsh@\S{1,160}: (?P<host>[\w.-]{1,80}): (?:\w{2,8}: )?(?P<why>No route to host"
            r"|Connection (?:refused|timed out|reset))",
            title="pdsh to {host}: {why}",
            sample="pdsh@node0: worker-2: connect: No route to host",
        ),
        Signature(
            words="orte plm prte ssh authentication",
            pattern=r"(?:ORTE|PRTE|PLM).{0,40}unable to (?:reliably )?start one or more daemons|ssh exited with "
            r"exit code 255|Too many authentication failures"
            r"|ssh: not found",
            tier=Tier.GENERIC,
            sample="pdsh@node0: worker-1: ssh exited with exit code 255",
        ),
    ),
)

RESOURCE_FILTER_INVALID = Rule(
    id="resource-filter-invalid",
    stage=Stage.LAUNCH,
    title="the launcher was asked for {what|hosts or slots} that the hostfile does not have",
    fix="ask only for what the hostfile has, in the form --include 'host1:0,1@host2:0'",
    steps=(step("cat /job/hostfile"), step("python -m dsdoctor check")),
    explained_by=("cuda-not-initialized", "driver-too-old", "driver-silent"),
    manual="""The launcher was asked for hosts or slots that the hostfile does not have.

--include and --exclude name hosts and slots of the hostfile (slots count from 0), one of the two at a time, and
not together with --num_gpus or --num_nodes; mpirun counts the slots as well. The launcher also turns
CUDA_VISIBLE_DEVICES into such a filter.

Why it matters: The launcher stops before any process is started.""",
    signatures=(
        Signature(
            words="hostname+hostfile",
            pattern=r"Hostname '(?P<what>[^']{0,80})' not found in hostfile",
            not_after=r"Unable to find hostfile",
            sample="ValueError: Hostname 'worker-7' not found in hostfile",
        ),
        Signature(
            words="slot+host",
            pattern=r"No slot '(?P<slot>[^']{0,20})' specified on host '(?P<what>[^']{0,80})'",
            title="slot {slot} of {what} is asked for, and the hostfile does not have it",
            sample="ValueError: No slot '8' specified on host 'worker-1'",
        ),
        Signature(
            words="mutually+exclusive include+exclude limiting+nodes exclusion cannot+select",
            pattern=r"include_str and exclude_str are mutually exclusive|Cannot specify num_nodes/gpus with "
            r"include/exclude"
            r"|backend does not support (?:worker include|limiting num nodes)|backend cannot select specific device",
            title="filters that exclude each other, or that this launcher does not have",
            sample="ValueError: Cannot specify num_nodes/gpus with include/exclude",
        ),
        Signature(
            words="unpack",
            pattern=r"ValueError: (?:too many|not enough) values to unpack",
            after=r"parse_node_config|parse_resource_filter|parse_inclusion_exclusion",
            title="--include or --exclude is not of the form 'host1:0,1@host2:0'",
            sample='  File "/v/deepspeed/launcher/runner.py", line 286, in parse_node_config_list\n'
            "ValueError: too many values to unpack (expected 2)",
        ),
        Signature(
            words="slurm+remapping",
            pattern=r"slurm backend does not support remapping visible devices",
            title="--detect_nvlink_pairs does not go together with the slurm launcher",
            fix="leave --detect_nvlink_pairs out, or use another launcher",
            sample="AssertionError: slurm backend does not support remapping visible devices",
        ),
        Signature(
            words="slot+count exceeds+available",
            pattern=r"backend needs the same slot count on every host, got (?P<what>\{.{1,80}?\})"
            r"|(?P<what2>local_rank \d+) exceeds available GPUs in CUDA_VISIBLE_DEVICES",
            title="the number of ranks does not fit the slots or GPUs that are there: {what}",
            sample="ValueError: local_rank 4 exceeds available GPUs in CUDA_VISIBLE_DEVICES=0,1",
        ),
        Signature(
            words="slots+enough",
            pattern=r"There are not enough slots available in the system",
            title="more ranks are asked for than the hosts have slots",
            sample="There are not enough slots available in the system to satisfy the 4",
        ),
    ),
)

HOST_FILES_DIFFER = Rule(
    id="host-files-differ",
    stage=Stage.LAUNCH,
    title="{host|a host} does not have {path}: the launcher uses the same paths on every host",
    fix="let the folder of the job and the Python environment have the same path on every host: a shared file system, "
    "the same container image, or copies",
    steps=(step("ssh {host|HOST} ls -ld {path}"),),
    manual="""deepspeed changes into the same folder on each host, and starts the same Python there.

It takes both from the node where you launch: the current folder, and the path of the Python that runs deepspeed.

Why it matters: No rank starts on that host, and the ranks of the others wait for it.""",
    signatures=(
        Signature(
            words="bash+file+directory sh+cd+file",
            pattern=r"^(?:(?P<host>[\w.-]{1,80}): )?(?:/bin/)?(?:ba|z)?sh: (?:line \d{1,4}: |\d{1,4}: )?(?:cd: )?"
            r"(?P<path>/[^\s:]{1,200}): No such file or directory",
            after=r"\bpdsh\b|multinode_runner\.py",
            sample="[INFO] [runner.py:570:main] cmd = pdsh -S -f 1024 -w 172.16.220.18 export PYTHONPATH=/data; cd /data; "
            "/home/lxw/bin/python -u -m deepspeed.launcher.launch\n"
            "172.16.220.18: bash: /home/lxw/bin/python: No such file or directory",
        ),
    ),
)

RULES = (HOSTFILE_MALFORMED, SSH_UNREACHABLE, RESOURCE_FILTER_INVALID, HOST_FILES_DIFFER)
