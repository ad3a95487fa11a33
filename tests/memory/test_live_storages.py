"""The measured steps compile what they compile without it."""

import pytest

torch = pytest.importorskip("torch")

from dsdoctor.memory.engine import LiveStorages  # noqa: E402


@pytest.mark.slow
def test_what_is_compiled_while_storages_are_watched_is_compiled() -> None:
    """Under a mode of its own kind torch compiles nothing, and raises where the whole function was to be compiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin().cos().sum(), fullgraph=True, backend=backend)
    live = LiveStorages()
    live.start(existing=False)
    try:
        held = torch.ones(1000)
        value = function(held)
        most = live.mark()
    finally:
        live.stop()

    assert len(graphs) == 1
    assert value.item() == held.sin().cos().sum().item()
    assert most["cpu"] >= held.untyped_storage().nbytes()
