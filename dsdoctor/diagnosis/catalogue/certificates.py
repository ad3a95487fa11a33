"""The rule of certificates whose time is not now: a clock that is wrong, or a certificate that is old."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

CERTIFICATE_OUT_OF_DATE = Rule(
    id="certificate-out-of-date",
    stage=Stage.RUN,
    title="the server's certificate {problem|is out of date} by this machine's clock: the clock is wrong, or the certificate is",
    fix="compare the clock with the true time, and set it (chrony, NTP); a container has its host's. If it is right, the "
    "server, mirror or proxy needs a new certificate; a root that has expired is mended by a newer certifi",
    steps=(step("date -u"), step("timedatectl"), step("python -m pip install -U certifi")),
    manual="""Python refuses the server, because the time of its certificate is not the time of this machine.

A machine without a battery for its clock, or without NTP, begins in a year that is past: then every certificate "is not
yet valid". One that "has expired" is the server's own, a mirror's or a proxy's, or a root in an old certifi; a clock that
runs ahead looks the same.

Why it matters: Neither models nor packages can be fetched. Switching the check off lets anybody answer.""",
    signatures=(
        Signature(
            words="certificate+valid certificate+expired",
            pattern=r"certificate (?P<problem>is not yet valid|has expired)",
            tier=Tier.PROBE,
            sample="'(MaxRetryError(\"HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded (Caused by "
            "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
            "certificate is not yet valid (_ssl.c:1006)')))\"), '(Request ID: 7)')' thrown while requesting HEAD https://hub.example/a",
        ),
        Signature(
            words="certificate+valid certificate+expired",
            pattern=r"^(?:(?:[\w.]{1,80}\.)?(?:\w{0,40}SSL\w{0,20}Error|URLError|\w{0,20}ConnectionError|MaxRetryError"
            r"|ConnectError|ClientConnectorCertificateError): |curl: \(\d{1,3}\) |fatal: unable to access ).{0,1200}?"
            r"certificate (?P<problem>is not yet valid|has expired)",
            sample="urllib.error.URLError: <urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
            "certificate has expired (_ssl.c:1006)>",
        ),
    ),
)

RULES = (CERTIFICATE_OUT_OF_DATE,)
