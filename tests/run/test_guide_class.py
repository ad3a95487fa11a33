"""Ours in the place of transformers' class: said once, one for each model, and given up to an engine's watch."""

from types import ModuleType, SimpleNamespace

from torch import nn

from dsdoctor.overflow.watch.debug import DebugUnderflowOverflow
from dsdoctor.run.script import GuideClass


def replaced() -> tuple[GuideClass, type[DebugUnderflowOverflow], list[str]]:
    said: list[str] = []
    guide = GuideClass(said.append)
    theirs = ModuleType("transformers.debug_utils")
    theirs.DebugUnderflowOverflow = object  # type: ignore[attr-defined]
    guide.replace(theirs)
    return guide, theirs.DebugUnderflowOverflow, said  # type: ignore[attr-defined]


def test_a_second_one_of_the_same_model_takes_the_place_of_the_first() -> None:
    _, ours, said = replaced()
    model = nn.Linear(1, 1)
    first, second = ours(model), ours(model, max_frames_to_save=3)

    assert issubclass(ours, DebugUnderflowOverflow)
    assert said == ["dsdoctor's DebugUnderflowOverflow replaces transformers'"]
    assert not first._hooks._handles
    assert second._hooks._handles


def test_an_engine_of_that_model_is_watched_more_closely_and_others_are_as_asked() -> None:
    guide, ours, said = replaced()
    asked = {"level": "guard", "on_overflow": "report"}
    model = nn.Linear(1, 1)
    mine = ours(model)

    assert guide.options_for(SimpleNamespace(module=nn.Linear(1, 1)), asked) == asked
    assert guide.options_for(SimpleNamespace(module=nn.Sequential(model)), asked) == {
        "level": "frames",
        "on_overflow": "raise",
    }
    assert "the engine's watch takes over at level frames" in said[-1]
    assert not mine._hooks._handles


def test_a_module_without_the_class_stays_as_it_is() -> None:
    empty = ModuleType("transformers.debug_utils")
    GuideClass(print).replace(empty)

    assert not hasattr(empty, "DebugUnderflowOverflow")
