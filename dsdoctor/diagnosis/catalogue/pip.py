"""Rules of pip and uv: nothing found, no network, proxies and certificates, resolvers, protected environments, hashes."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PIP_NO_MATCHING_VERSION = Rule(
    id="pip-no-matching-version",
    stage=Stage.INSTALL,
    title="pip finds no {requirement} for this Python and platform",
    fix="see which versions there are, and whether they are for this Python and platform; CUDA builds of torch "
    "are on an index of their own (--index-url https://download.pytorch.org/whl/cu128)",
    steps=(
        step("python -m pip index versions {name|NAME}"),
        step("python --version"),
        step("python -m pip install -U pip"),
    ),
    explained_by=("pip-network", "pip-proxy", "pip-certificate", "pip-wrong-python", "certificate-out-of-date"),
    manual="""No file of the package fits: its version does not exist, or no wheel is for this Python, platform or libc.

"(from versions: none)" means that the index has nothing at all that fits, or was not reached. A local label such as
+cu121 is found on torch's own index only. An old pip does not know newer kinds of wheels.

Why it matters: Nothing is installed.""",
    signatures=(
        Signature(
            words="matching+distribution",
            pattern=r"No matching distribution found for "
            r"(?P<requirement>(?!triton|dskernels\b)(?P<name>[A-Za-z][\w.-]{0,60})(?:\[[\w,-]{1,40}\])?"
            r"(?:[ (<>=!~]{1,4}[\w.*+!<>=~, ]{1,60}\)?)?)",
            sample="ERROR: No matching distribution found for torch==2.1.0+cu121",
        ),
        Signature(
            words="matching+dskernels",
            pattern=r"No matching distribution found for (?P<requirement>dskernels)\b",
            title="pip finds no {requirement}: the module's package is named deepspeed-kernels, and its wheels are for "
            "Linux only",
            fix="on Linux install deepspeed-kernels; on Windows there is none: leave out the ops that need it "
            "(DS_BUILD_CUTLASS_OPS=0, DS_BUILD_RAGGED_DEVICE_OPS=0)",
            steps=(step("python -m pip install deepspeed-kernels", note="Linux"),),
            sample="ERROR: No matching distribution found for dskernels",
        ),
        Signature(
            words="satisfies+version",
            pattern=r"ERROR: Could not find a version that satisfies the requirement "
            r"(?P<requirement>(?!triton|dskernels\b)(?P<name>[A-Za-z]"
            r"[\w.-]{0,60})\S{0,60})",
            tier=Tier.GENERIC,
            sample="ERROR: Could not find a version that satisfies the requirement flash-attn==9.9 (from "
            "versions: 1.0.0, 2.8.3)",
        ),
        Signature(
            words="supported+wheel+platform",
            pattern=r"ERROR: (?P<requirement>\S{1,160}\.whl) is not a supported wheel on this platform",
            title="{requirement} is for another Python, platform or libc",
            fix="take the wheel whose tags fit: cp311 is Python 3.11, manylinux_2_28 needs glibc 2.28",
            steps=(step("python -m pip debug --verbose"), step("python -m dsdoctor pick FOLDER")),
            sample="ERROR: deepspeed-0.15.0-cp311-cp311-linux_x86_64.whl is not a supported wheel on this platform.",
        ),
    ),
)

PIP_NETWORK = Rule(
    id="pip-network",
    stage=Stage.INSTALL,
    title="pip does not reach the package index{host_hint}",
    fix="install where there is a network (not on a compute node), give pip the mirror of your site, or take the "
    "wheels along",
    steps=(
        step("python -m pip config list"),
        step("python -m pip download -d wheels deepspeed"),
        step("python -m pip install --no-index --find-links wheels deepspeed"),
    ),
    explained_by=("certificate-out-of-date",),
    manual="""pip tried the index several times and got no answer.

Compute nodes and build containers often have no way out, or no name service. pip then goes on and says that no
version was found, which only follows. With build isolation pip asks the index for setuptools, too.

Why it matters: Nothing is installed, and the last message hides the reason.""",
    signatures=(
        Signature(
            words="broken+connection",
            pattern=r"Retrying \(Retry\(total=[1-9]\d{0,2}, .{0,200}after connection broken by "
            r"'(?:NewConnection|ConnectTimeout|ReadTimeout"
            r"|NameResolution|Protocol|ConnectionReset)\w{0,12}",
            tier=Tier.PROBE,
            title="pip had to try the package index several times",
            sample="WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) "
            "after connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection "
            "object at 0x7f>: Failed to establish a new connection: [Errno 101] Network is unreachable')': "
            "/simple/deepspeed/",
        ),
        Signature(
            words="broken+connection",
            pattern=r"Retrying \(Retry\(total=0, .{0,200}after connection broken by "
            r"'(?:NewConnection|ConnectTimeout|ReadTimeout"
            r"|NameResolution|Protocol|ConnectionReset)\w{0,12}",
            tier=Tier.GENERIC,
            sample="WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) "
            "after connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection "
            "object at 0x7f>: Failed to establish a new connection: [Errno 101] Network is unreachable')': "
            "/simple/deepspeed/",
        ),
        Signature(
            words="pypi+max pythonhosted+max pypi+timed pythonhosted+timed",
            pattern=r"HTTPSConnectionPool\(host='(?P<host>(?:pypi\.org|files\.pythonhosted\.org"
            r"|download\.pytorch\.org))', port=443\): "
            r"(?:Max retries exceeded(?!.{0,400}(?:SSL|Proxy))|Read timed out)",
            tier=Tier.GENERIC,
            sample="ERROR: HTTPSConnectionPool(host='files.pythonhosted.org', port=443): Read timed out.",
        ),
        Signature(
            words="request+retries fetch+failed dns+error",
            pattern=r"error: (?:Failed to fetch|Request failed after \d{1,3} retries).{0,200}|Caused by: dns "
            r"error: failed to lookup address",
            tier=Tier.GENERIC,
            title="uv does not reach the package index",
            sample="error: Request failed after 3 retries",
        ),
    ),
)

PIP_PROXY = Rule(
    id="pip-proxy",
    stage=Stage.INSTALL,
    title="pip does not get through the proxy",
    fix="correct https_proxy (it begins with http:// for most proxies), with user and password where the proxy "
    "wants them",
    steps=(step("env | grep -i proxy"), step("export https_proxy=http://HOST:PORT")),
    manual="""A proxy is set, and it refuses the connection, cannot be reached, or wants to know who asks (407).

https_proxy, HTTPS_PROXY and pip's own configuration name it. A proxy that is left over in the environment does the
same.

Why it matters: Nothing is installed; pip says at the end that no version was found.""",
    signatures=(
        Signature(
            words="proxyerror proxy+connect",
            pattern=r"\bProxyError\(|Cannot connect to proxy|407 Proxy Authentication Required",
            tier=Tier.GENERIC,
            unless=r"huggingface|hf\.co",
            sample="WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
            "'ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 407 Proxy Authentication "
            "Required'))': /simple/deepspeed/",
        ),
    ),
)

PIP_CERTIFICATE = Rule(
    id="pip-certificate",
    stage=Stage.INSTALL,
    title="the certificate of the package index is not accepted: often a firewall's own stands in between",
    fix="give pip the certificate of your site's firewall or mirror; check the clock of this machine",
    steps=(
        step("python -m pip config set global.cert /path/to/site-ca.pem"),
        instead("export REQUESTS_CA_BUNDLE=/path/to/site-ca.pem"),
    ),
    explained_by=("certificate-out-of-date",),
    manual="""pip cannot verify who answers.

A firewall that opens encrypted connections signs with a certificate of its own, which pip does not know; old
certificates (certifi), and a wrong clock, do the same.

Why it matters: Nothing is installed. --trusted-host switches the check off, and then anybody can put in another
package.""",
    signatures=(
        Signature(
            words="sslerror+certificate sslcertverificationerror certificate_verify_failed",
            pattern=r"(?:SSLError\(|Could not fetch URL |connection broken by ).{0,200}(?:certificate verify "
            r"failed|CERTIFICATE_VERIFY_FAILED)",
            tier=Tier.GENERIC,
            unless=r"huggingface|hf\.co|thrown while requesting|wandb|/graphql|Retry\(total=[1-9]",
            sample="WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
            "'SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
            "self-signed certificate in certificate chain'))'",
        ),
    ),
)

PIP_RESOLUTION_IMPOSSIBLE = Rule(
    id="pip-resolution-impossible",
    stage=Stage.INSTALL,
    title="the requirements contradict each other: no versions satisfy all of them{packages_hint}",
    fix="loosen one of the bounds that are named below the message, or install what conflicts into an "
    "environment of its own",
    steps=(step("python -m pip install --dry-run NAME1 NAME2"), step("python -m pip check")),
    explained_by=("triton-pin-conflict",),
    manual="""Two packages want versions of a third that cannot both be.

The lines below name who asks for what. Pins of exact versions in a requirements file are the usual reason.

Why it matters: Nothing is installed.""",
    signatures=(
        Signature(
            words="conflicting+dependencies",
            pattern=r"ERROR: Cannot install (?P<packages>.{1,200}?) because these package versions have "
            r"conflicting dependencies",
            unless=r"triton",
            sample="ERROR: Cannot install -r requirements.txt (line 3) and transformers==4.30.0 because these "
            "package versions have conflicting dependencies.",
        ),
        Signature(
            words="resolutionimpossible",
            pattern=r"ERROR: ResolutionImpossible:",
            tier=Tier.GENERIC,
            sample="ERROR: ResolutionImpossible: for help visit "
            "https://pip.pypa.io/en/latest/topics/dependency-resolution/",
        ),
        Signature(
            words="solution+resolving",
            pattern=r"No solution found when resolving (?:dependencies|tool dependencies)",
            tier=Tier.GENERIC,
            sample="× No solution found when resolving dependencies:",
        ),
    ),
)

PIP_ENVIRONMENT_PROTECTED = Rule(
    id="pip-environment-protected",
    stage=Stage.INSTALL,
    title="this Python belongs to the operating system, and pip may not install into it",
    fix="make a virtual environment and install there",
    steps=(step("python3 -m venv ~/venv"), step("~/venv/bin/python -m pip install deepspeed")),
    manual="""The distribution has marked its own Python as managed by it (PEP 668).

Debian 12, Ubuntu 23.04 and others do so. A virtual environment, conda or uv's own Python is not protected.

Why it matters: Nothing is installed. --break-system-packages can break tools of the system.""",
    signatures=(
        Signature(
            words="externally+managed",
            pattern=r"error: externally-managed-environment",
            sample="error: externally-managed-environment",
        ),
    ),
)

PIP_HASH_MISMATCH = Rule(
    id="pip-hash-mismatch",
    stage=Stage.INSTALL,
    title="a package is not the file that the requirements name by its hash",
    fix="download it again without the cache; if the hash stays another, find out why before you change the "
    "requirements",
    steps=(step("python -m pip cache purge"), step("python -m pip install --no-cache-dir -r requirements.txt")),
    manual="""A requirement is pinned by a hash, and what was downloaded has another, or a requirement has none.

A download that broke off, a mirror with another build, or a package that was exchanged.

Why it matters: pip installs nothing that it cannot vouch for.""",
    signatures=(
        Signature(
            words="hashes+packages+match",
            pattern=r"THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
            sample="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have "
            "updated the package versions, please update the hashes.",
        ),
        Signature(
            words="hashes+mode",
            pattern=r"Hashes are required in --require-hashes mode",
            title="a requirement has no hash, and pip was told to take none without",
            sample="ERROR: Hashes are required in --require-hashes mode, but they are missing from some "
            "requirements here.",
        ),
    ),
)

PIP_WRONG_PYTHON = Rule(
    id="pip-wrong-python",
    stage=Stage.INSTALL,
    title="{name|a package} is not for this Python{here_hint}: it asks for {wanted|another}",
    fix="use a Python that it takes, or an older release of the package",
    steps=(step("python --version"), step("uv venv --python 3.11 ~/venv"), instead("conda create -n ds python=3.11")),
    manual="""The package says for which Pythons it is, and this one is not among them.

Why it matters: pip refuses it, or takes an old release without a word.""",
    signatures=(
        Signature(
            words="python+requires+different",
            pattern=r"ERROR: Package '(?P<name>[^']{1,80})' requires a different Python: (?P<here>[\d.]{1,12}) "
            r"not in '(?P<wanted>[^']{1,60})'",
            sample="ERROR: Package 'torch' requires a different Python: 3.8.10 not in '>=3.9'",
        ),
        Signature(
            words="ignored+different+python",
            pattern=r"ERROR: Ignored the following versions that require a different python version: "
            r".{0,80}Requires-Python "
            r"(?P<wanted>[<>=!~][^;]{1,40})",
            tier=Tier.GENERIC,
            sample="ERROR: Ignored the following versions that require a different python version: 1.21.2 "
            "Requires-Python >=3.7,<3.11",
        ),
    ),
)

PIP_PERMISSION = Rule(
    id="pip-permission",
    stage=Stage.INSTALL,
    title="pip may not write into this environment",
    fix="install into a virtual environment of your own; a shared one belongs to its administrator",
    steps=(step("python3 -m venv ~/venv"), step("~/venv/bin/python -m pip install deepspeed")),
    manual="""The folder of the environment belongs to another user, or is read-only.

Why it matters: Nothing is installed, or half of it.""",
    signatures=(
        Signature(
            words="permission+install+packages oserror+install+packages environmenterror+install+packages",
            pattern=r"ERROR: Could not install packages due to an (?:OSError|EnvironmentError): \[Errno (?:13|30)\]",
            sample="ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: "
            "'/usr/lib/python3'",
        ),
    ),
)

RULES = (
    PIP_NO_MATCHING_VERSION,
    PIP_NETWORK,
    PIP_PROXY,
    PIP_CERTIFICATE,
    PIP_RESOLUTION_IMPOSSIBLE,
    PIP_ENVIRONMENT_PROTECTED,
    PIP_HASH_MISMATCH,
    PIP_WRONG_PYTHON,
    PIP_PERMISSION,
)
