"""The classes and functions that files of DeepSpeed's checkpoints name and that may be called; any other one is not known.

Only where DeepSpeed's own tools open the files is this asked: they do it without ``weights_only``, and a pickle may name any
function of the system. Nothing of dsdoctor's calls one.
"""

import re
from collections.abc import Iterator

from dsdoctor.checkpoint.examine import Examined

TRUSTED = re.compile(
    # how torch and Python write tensors, shapes, dictionaries and sets
    r"torch\.\w{1,20}Storage|torch\.Size|torch\.Tensor|torch\.device|torch\.(bfloat16|u?int\d{1,2}|float\d\w{0,12}|bool)"
    r"|torch\._utils\._rebuild_(tensor_v[23]|parameter|parameter_with_state)|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.nn\.parameter\.Parameter|torch\.storage\.UntypedStorage"
    r"|collections\.(OrderedDict|defaultdict)|(__builtin__|builtins)\.(set|frozenset|bytearray|complex|slice|dict|list|int)"
    # numpy's arrays and numbers: states of random generators
    r"|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)|_codecs\.encode"
    # plain data of DeepSpeed, and Megatron's arguments
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum|deepspeed\.runtime\.fp16\.loss_scaler\.\w{0,20}LossScaler"
    r"|deepspeed\.utils\.tensor_fragment\.fragment_address|argparse\.Namespace",
    re.ASCII,
)
SCRIPTED = "constants.pkl"
"""An entry that makes torch.load take a file for a program of TorchScript."""


def untrusted(examined: Examined) -> Iterator[tuple[str, str]]:
    """What is named besides: (the name, the file)."""
    for file in examined.tag.files:
        yield from ((name, file.path.name) for name in sorted(file.names) if not TRUSTED.fullmatch(name))
        if SCRIPTED in file.entries:
            yield "a TorchScript program", file.path.name
