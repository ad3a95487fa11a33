"""Every rule of the catalogue by its id; `dsdoctor explain RULE` prints the manual page."""

from dsdoctor.diagnosis.catalogue import (
    arch,
    compiler,
    config,
    flags,
    gpu,
    gradients,
    headers,
    hosts,
    huggingface,
    install,
    jit,
    launch,
    libraries,
    link,
    load,
    memory,
    network,
    optimizers,
    packages,
    run,
    toolkit,
    zero,
)
from dsdoctor.diagnosis.models import Rule

TOPICS = (
    install,
    packages,
    toolkit,
    arch,
    compiler,
    flags,
    headers,
    libraries,
    link,
    load,
    jit,
    hosts,
    launch,
    run,
    network,
    config,
    optimizers,
    huggingface,
    memory,
    gpu,
    zero,
    gradients,
)

RULES: dict[str, Rule] = {rule.id: rule for topic in TOPICS for rule in topic.RULES}
