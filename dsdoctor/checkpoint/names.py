"""The names that DeepSpeed gives to the files of a tag -> what each file holds; and the other way round."""

import enum
import re
from dataclasses import dataclass

PATTERN = re.compile(
    r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{2,7})_?(?P<what>optim|model)_?states\.pt"
    r"|mp_rank_(?P<only>\d{2,7})_model_states\.pt"
    r"|layer_(?P<moe>\d{1,7})_expert_(?P<expert>\d{1,7})_mp_rank_(?P<moe_mp>\d{2,7})_model_states\.pt"
    r"|expp_rank_(?P<expp>\d{1,7})_mp_rank_(?P<expp_mp>\d{2,7})_optim_states\.pt"
    r"|layer_(?P<layer>\d{2,7})-(?:model_(?P<model>\d{2,7})-)?model_states\.pt",
    re.ASCII,
)


class Part(enum.Enum):
    """What a file holds."""

    MODEL = "model states"
    OPTIMIZER = "optimizer states"
    EXPERT = "an expert's weights"
    EXPERT_OPTIMIZER = "an expert rank's optimizer states"
    LAYER = "a pipeline layer's weights"


@dataclass(frozen=True, kw_only=True, order=True)
class ShardName:
    """``data``: the data-parallel rank, ``model``: the model-parallel one (tensor and pipeline together). None: has none.

    ``layer`` and ``expert`` number what an expert's or a pipeline's file holds; ``bf16`` is the mark of a bf16 optimizer.
    """

    part: str
    data: int | None = None
    model: int | None = None
    layer: int | None = None
    expert: int | None = None
    bf16: bool = False


def parse_name(name: str) -> ShardName | None:
    """What a file of this name holds; None for one that is none of a checkpoint.

    >>> parse_name("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt")
    ShardName(part='OPTIMIZER', data=3, model=0, layer=None, expert=None, bf16=True)
    >>> parse_name("layer_02-model_states.pt")
    ShardName(part='LAYER', data=None, model=None, layer=2, expert=None, bf16=False)
    >>> parse_name("training_args.bin") is None
    True
    """
    found = PATTERN.fullmatch(name)
    if not found:
        return None
    number = {key: int(text) for key, text in found.groupdict().items() if text and text.isdigit()}
    if found["what"]:
        part = Part.OPTIMIZER if found["what"] == "optim" else Part.MODEL
        return ShardName(part=part.name, data=number["dp"], model=number["mp"], bf16=bool(found["bf16"]))
    if found["only"]:
        return ShardName(part=Part.MODEL.name, model=number["only"])
    if found["moe"]:
        return ShardName(part=Part.EXPERT.name, layer=number["moe"], expert=number["expert"], model=number["moe_mp"])
    if found["expp"]:
        return ShardName(part=Part.EXPERT_OPTIMIZER.name, expert=number["expp"], model=number["expp_mp"])
    return ShardName(part=Part.LAYER.name, layer=number["layer"], model=number.get("model"))


def optimizer_name(data: int, model: int, *, bf16: bool) -> str:
    """The file of a rank's optimizer states.

    >>> optimizer_name(3, 0, bf16=True)
    'bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt'
    """
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"


def model_name(data: int | None, model: int) -> str:
    """The file of the model states; at stage 3 each data-parallel rank has one.

    >>> model_name(None, 1), model_name(2, 0)
    ('mp_rank_01_model_states.pt', 'zero_pp_rank_2_mp_rank_00_model_states.pt')
    """
    rank = "" if data is None else f"zero_pp_rank_{data}_"
    return f"{rank}mp_rank_{model:02d}_model_states.pt"


def expert_name(layer: int, expert: int, model: int) -> str:
    """The file of an expert's weights."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{model:02d}_model_states.pt"


def layer_name(layer: int, model: int | None) -> str:
    """The file of a pipeline layer's weights."""
    return f"layer_{layer:02d}-{'' if model is None else f'model_{model:02d}-'}model_states.pt"
