"""The optimizer's states and what its step takes besides, per trained element on a rank."""

from dsdoctor.memory import names
from dsdoctor.memory.account import Account
from dsdoctor.memory.models import Place, ZeroSettings

STATES = {"sgd": 0, "lion": 1, "adagrad": 1, "muon": 1}
"""fp32 states for each element; of all others two (Adam's and its kind's exp_avg and exp_avg_sq)."""
FP32 = 4


def state_size(settings: ZeroSettings) -> int:
    """Bytes of optimizer states for each element of the fp32 copy."""
    return FP32 * STATES.get((settings.optimizer or "").lower(), 2)


def fused(settings: ZeroSettings) -> bool:
    """Whether the step writes in place, as DeepSpeed's own kernels do (DeepSpeedEngine.get_optimizer_configuration)."""
    return not settings.torch_adam


def step(account: Account, settings: ZeroSettings, elements: int, largest: int, place: Place) -> None:
    """An optimizer's step over so many fp32 elements, ``largest`` in one tensor: its states are there after it.

    torch.optim.Adam makes two temporaries of the denominator (``_single_tensor_adamw``, tensor after tensor, on a CPU;
    ``_multi_tensor_adamw``, of all at once, on a GPU).
    """
    account.hold(names.STATES, elements * state_size(settings), place)
    if not fused(settings):
        on_cpu = place == "host" or account.together
        account.passing(names.STEP_TEMPORARY, 2 * FP32 * (largest if on_cpu else elements), place)
