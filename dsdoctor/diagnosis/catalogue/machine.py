"""Rules of the machine around the program: shells, interpreters, accounts, temporary folders, OpenMP, container engines."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

SCRIPT_NOT_STARTABLE = Rule(
    id="script-not-startable",
    stage=Stage.LAUNCH,
    title="the system cannot start {program|the script}: its first line, its rights or its format do not fit",
    fix="start it through its interpreter (bash SCRIPT.sh, python SCRIPT.py), or mend what the message names",
    steps=(step("head -1 {program|SCRIPT}"), step("ls -l {program|SCRIPT}")),
    manual="""A script is started by the program that its first line (#!) names, and must be marked executable.

Files that were written on Windows end each line with \\r, so that the program is looked for under a wrong name.

Why it matters: Nothing has been started at all.""",
    signatures=(
        Signature(
            words="bash+directory sh+directory python+directory python3+directory",
            pattern=r"^(?:[\w./-]{1,80}: )?(?:/usr/bin/)?env: ['‘\"](?P<program>[\w./-]{1,60})\\r['’\"]?: No such file|bad "
            r"interpreter: (?P<program2>\S{1,80})\^M: No such file|^(?:\S{1,80}: )?line \d{1,5}: \$'\\r': command not found",
            title="the script has line endings of Windows (CRLF), so the system looks for a program named '{program|...}\\r'",
            fix="make them those of Linux: dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT; with git core.autocrlf input",
            steps=(step("dos2unix SCRIPT"),),
            sample="/usr/bin/env: ‘bash\\r’: No such file or directory",
        ),
        Signature(
            words="env+directory",
            pattern=r"^(?:/usr/bin/)?env: ['‘\"]?(?P<program>[\w./-]{1,60})['’\"]?: No such file or directory",
            tier=Tier.GENERIC,
            title="there is no program {program} on PATH: the script's first line asks env for it",
            fix="activate the environment that has it (conda activate, source venv/bin/activate) where the ranks are "
            "started; where only python3 is there, start python3 SCRIPT.py",
            steps=(step("which -a python python3"),),
            sample="/usr/bin/env: ‘python’: No such file or directory",
        ),
        Signature(
            words="line+python+directory line+python3+directory",
            pattern=r"^(?:\S{1,60}: )?(?:bash|sh|zsh): line \d{1,5}: (?P<program>/\S{1,160}/python[\d.]{0,5}): No such file or "
            r"directory",
            tier=Tier.GENERIC,
            title="a node has no {program}: the launcher starts the Python of the first node under the same path there",
            fix="install the environment under the same path on every node, or put it on a shared disk",
            steps=(step("pdsh -w HOSTS ls -l {program}"),),
            sample="node2: bash: line 1: /venv/bin/python: No such file or directory",
        ),
        Signature(
            words="permission+denied",
            pattern=r"^(?:-?(?:ba|z|da)?sh|/bin/(?:ba)?sh|srun|slurmstepd|[\w./-]{1,60}): (?:line \d{1,5}: |\d{1,5}: |error: "
            r"execve\(\): )?(?P<program>[\w./-]{0,80}\.(?:sh|py|slurm|sbatch)): Permission denied",
            tier=Tier.GENERIC,
            title="{program} is not executable (permission denied)",
            fix="chmod +x {program}, or start it through bash or python; a disk that is mounted noexec takes no scripts",
            steps=(step("chmod +x {program}"),),
            sample="bash: ./train.sh: Permission denied",
        ),
        Signature(
            words="oserror+errno+format exec+format",
            pattern=r"OSError: \[Errno 8\] Exec format error: '(?P<program>[^']{1,160})'|: (?P<program2>[\w./-]{1,120}): cannot "
            r"execute binary file: Exec format error",
            title="{program} is a program for another architecture of processor, or a script without #! in its first "
            "line (Exec format error)",
            fix="see with `file` what it is: take the build for this processor (x86_64 or aarch64), or write #!/bin/bash "
            "in its first line",
            steps=(step("file {program}"), step("uname -m")),
            sample="OSError: [Errno 8] Exec format error: '/work/launch.sh'",
        ),
    ),
)

SHELL_NOT_SET_UP = Rule(
    id="shell-not-set-up",
    stage=Stage.LAUNCH,
    title="the environment was not activated in this shell: {what|it is not set up for that}",
    fix="a batch job and ssh start a plain shell: source conda's script first, or call the environment's python by its "
    "path",
    steps=(
        step('source "$(conda info --base)/etc/profile.d/conda.sh"'),
        instead("conda run -n ENV python SCRIPT.py"),
    ),
    manual="""conda activate and module load are functions that an interactive shell's start files define.

A batch job, a container or ssh with a command does not read them.

Why it matters: The packages of another Python, or none, are found afterwards.""",
    signatures=(
        Signature(
            words="conda+activate+configured conda+init+before",
            pattern=r"CommandNotFoundError: Your shell has not been properly configured to use '(?P<what>conda (?:de)?activate)'"
            r"|CondaError: Run '(?P<what2>conda init)' before 'conda activate'",
            title="conda activate does not work in this shell ({what}): conda's start script was not read",
            sample="CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'.",
        ),
        Signature(
            words="environmentnamenotfound environmentlocationnotfound",
            pattern=r"Environment(?:Name|Location)NotFound: (?:Could not find conda environment|Not a conda environment): "
            r"(?P<what>\S{1,120})",
            title="there is no conda environment {what} on this machine",
            fix="list the environments of this node and user, and give the full path where it is on a shared disk",
            steps=(step("conda env list"),),
            sample="EnvironmentNameNotFound: Could not find conda environment: deepspeed",
        ),
        Signature(
            words="lmod+detected+error module+unable+locate modulefile+locate modulecmd.tcl",
            pattern=r"Lmod has detected the following error: .{0,80}(?P<what>module)|ModuleCmd_Load\.c.{0,60}Unable to locate a "
            r"modulefile for '(?P<what2>[^']{1,80})'|ERROR: Unable to locate a modulefile for '(?P<what3>[^']{1,80})'",
            title="module load failed: the {what} is not known on this machine",
            fix="see what there is (module avail, module spider NAME): names and versions differ between the login nodes "
            "and the others, and some need another module first",
            steps=(step("module spider cuda"), instead("module avail")),
            sample="Lmod has detected the following error: The following module(s) are unknown:",
        ),
    ),
)

TEMPORARY_FOLDER_MISSING = Rule(
    id="temporary-folder-missing",
    stage=Stage.RUN,
    title="there is no folder for temporary files that may be written: {what|/tmp is full or read-only}",
    fix="free /tmp or set TMPDIR to a folder that exists and may be written on this node (a container: mount one)",
    steps=(step("df -h /tmp"), step("export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR")),
    manual="""Python tries TMPDIR, TEMP, TMP, /tmp, /var/tmp, /usr/tmp and the current folder, and writes a file to each.

Full disks look the same as missing ones; a TMPDIR of a job's node may not exist in the container.

Why it matters: Compilers, torch's caches and multiprocessing all need such a folder.""",
    signatures=(
        Signature(
            words="usable+temporary+directory",
            pattern=r"FileNotFoundError: \[Errno 2\] No usable temporary directory found in (?P<what>\[.{1,200}\])",
            sample="FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp']",
        ),
    ),
)

ACCOUNT_WITHOUT_HOME = Rule(
    id="account-without-home",
    stage=Stage.RUN,
    title="this user has no home folder that Python can find (HOME is unset, or the number is not in /etc/passwd)",
    fix="set HOME (and USER) to a folder that may be written; in a container start with -e HOME=/tmp/home, or with a user "
    "that its /etc/passwd knows",
    steps=(step("export HOME=/tmp/home USER=user && mkdir -p $HOME"), step("id")),
    manual="""Caches of torch, triton and Hugging Face lie under the home folder.

Containers that run under a number (docker --user 1000, OpenShift) have no entry in /etc/passwd.

Why it matters: The first package that looks for its cache fails.""",
    signatures=(
        Signature(
            words="determine+home+directory",
            pattern=r"RuntimeError: (?:Could not determine home directory|Can't determine home directory)",
            sample="RuntimeError: Could not determine home directory.",
        ),
    ),
)

OPENMP_TWICE = Rule(
    id="openmp-twice",
    stage=Stage.LOAD,
    title="two OpenMP libraries meet in one process ({what|libiomp5 and libgomp})",
    fix="let numpy, torch and scikit-learn come from one source (all by pip or all by conda) in a fresh environment; "
    "until then export MKL_SERVICE_FORCE_INTEL=1, or MKL_THREADING_LAYER=GNU; on Windows KMP_DUPLICATE_LIB_OK=TRUE hides "
    "it",
    steps=(step("export MKL_SERVICE_FORCE_INTEL=1"), step("export MKL_THREADING_LAYER=GNU")),
    manual="""Intel's OpenMP (libiomp5) and GNU's (libgomp) each want to be the only one.

conda's numpy brings MKL with Intel's, pip's torch GNU's. Which of them is loaded first decides.

Why it matters: The process ends itself, without a traceback of Python.""",
    signatures=(
        Signature(
            words="mkl_threading_layer+incompatible",
            pattern=r"MKL_THREADING_LAYER=(?P<what>\w{1,20}) is incompatible with (?P<file>libgomp\S{0,40})",
            title="MKL_THREADING_LAYER={what} does not go with the OpenMP of GNU ({file}) that is loaded already",
            sample="Error: mkl-service + Intel(R) MKL: MKL_THREADING_LAYER=INTEL is incompatible with libgomp-a34b3233.so.1 "
            "library.",
        ),
        Signature(
            words="omp+error+initializing",
            pattern=r"OMP: Error #15: Initializing (?P<what>\S{1,60}), but found",
            sample="OMP: Error #15: Initializing libiomp5md.dll, but found libiomp5md.dll already initialized.",
        ),
    ),
)

CONTAINER_NOT_STARTED = Rule(
    id="container-not-started",
    stage=Stage.LAUNCH,
    title="the container was not started: {why}",
    fix="mend what the message names, then start it again; nothing of DeepSpeed has run",
    steps=(step("docker info"), instead("apptainer version")),
    manual="""Docker, Apptainer (Singularity), enroot or Kubernetes refused to make the container.

An image that is not there, a folder that is mounted and does not exist on that node, and missing rights are the usual
reasons.

Why it matters: No rank exists, and no log of one.""",
    signatures=(
        Signature(
            words="fatal+container+creation fatal+mount+source",
            pattern=r"FATAL: {1,8}container creation failed: (?P<why>.{1,160})",
            title="Apptainer cannot make the container: {why}",
            fix="give --bind folders that exist on every node (mount source), or leave that bind out; see APPTAINER_BIND",
            steps=(step("env | grep -E 'APPTAINER|SINGULARITY'"),),
            sample="FATAL:   container creation failed: mount /data->/data error: while mounting /data: mount source /data "
            "doesn't exist",
        ),
        Signature(
            words="fatal+open+image fatal+image",
            pattern=r"FATAL: {1,8}(?:could not open image|Unable to handle docker|While making image|image file) "
            r"?(?P<why>.{1,160})",
            title="Apptainer cannot open its image: {why}",
            fix="give the image's path as the nodes see it (a shared disk), or pull it again",
            steps=(step("ls -l IMAGE.sif"),),
            sample="FATAL:   could not open image /imgs/ds.sif: failed to retrieve path for /imgs/ds.sif: lstat "
            "/imgs/ds.sif: no such file or directory",
        ),
        Signature(
            words="docker+daemon+socket docker+daemon+running",
            pattern=r"(?P<why>permission denied while trying to connect to the Docker daemon socket|Got permission denied while "
            r"trying to connect to the Docker daemon|Cannot connect to the Docker daemon at \S{1,60})",
            title="docker cannot be used by this user, or its daemon does not run: {why}",
            fix="start the daemon (systemctl start docker), and put the user in the group docker (or use sudo, rootless "
            "docker, podman)",
            steps=(step("sudo usermod -aG docker $USER"), step("systemctl status docker")),
            sample="docker: permission denied while trying to connect to the Docker daemon socket at "
            "unix:///var/run/docker.sock",
        ),
    ),
)

SCRIPT_SYNTAX = Rule(
    id="script-syntax",
    stage=Stage.RUN,
    title="Python cannot read the script ({what}): a mistake in it, or it was written for another Python",
    fix="see the line above the message; print without brackets is Python 2, match and new annotations need 3.10 or "
    "newer: start it with the Python that it was written for",
    steps=(step("python --version"), step("python -m py_compile SCRIPT.py")),
    manual="""The file is no valid Python for the version that reads it.

Why it matters: Nothing of the script has run.""",
    signatures=(
        Signature(
            words="syntaxerror indentationerror taberror",
            pattern=r"^(?:SyntaxError|IndentationError|TabError): (?P<what>.{3,100})",
            tier=Tier.GENERIC,
            sample='  File "train.py", line 12\n    print "hello"\nSyntaxError: Missing parentheses in call to \'print\'',
        ),
    ),
)

RULES = (
    SCRIPT_NOT_STARTABLE,
    SHELL_NOT_SET_UP,
    TEMPORARY_FOLDER_MISSING,
    ACCOUNT_WITHOUT_HOME,
    OPENMP_TWICE,
    CONTAINER_NOT_STARTED,
    SCRIPT_SYNTAX,
)
