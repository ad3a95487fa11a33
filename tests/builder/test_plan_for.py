from pathlib import Path

from dsdoctor.builder.build import unknown_sites_note
from dsdoctor.core.build_models import OpFact, Source


def test_a_deepspeed_that_loads_ops_where_the_table_knows_of_none_is_said_to(tmp_path: Path) -> None:
    for name, text in {
        "op_builder/ops.py": "class NewBuilder: NAME = 'new_op'\nclass OtherBuilder: NAME = 'of_another_accelerator'\n",
        "deepspeed/engine.py": "def start():\n    NewBuilder().load()\n    OtherBuilder().load()\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    fact = OpFact(op="new_op", variable="DS_BUILD_NEW_OP", module="deepspeed.ops.new_op")
    source = Source(folder=str(tmp_path), asked="", version="0.99.0", digest="", accelerator="cuda", ops=(fact,))

    assert unknown_sites_note(source) == (
        "; DeepSpeed 0.99.0 also loads new_op in engine.py, and dsdoctor cannot tell when: "
        "name such an op with --ops instead of --for"
    )
