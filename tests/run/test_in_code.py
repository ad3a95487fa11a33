"""The watches as a script asks for them itself."""

import subprocess
import sys

import pytest

from dsdoctor.hang.inspection import stored

WITHOUT = """
import sys
sys.modules["transformers"] = None
import dsdoctor
print(dsdoctor.watch.__name__, dsdoctor.watch_hangs.__name__)
"""


@pytest.mark.slow
def test_the_watches_need_no_transformers() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)

    assert result.stdout.split() == ["watch", "watch_hangs"], result.stderr


def test_the_steps_of_a_trainer_are_what_the_watch_reads_of_the_callback() -> None:
    """It reads what an object holds; a property would be code of a script's."""
    transformers = pytest.importorskip("transformers")
    from dsdoctor.run.trainer_callback import HangCallback

    state = transformers.TrainerState(global_step=41)
    callback, seen = HangCallback(), []
    callback._options = None  # it is as if the watch had begun
    for event in (callback.on_train_begin, callback.on_step_end):
        event(None, state, None)
        seen.append(stored(callback._steps, "global_steps"))
        state.global_step += 1

    assert seen == [41, 42]
