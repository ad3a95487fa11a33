"""A DeepSpeed engine or any module -> a watch on it. A watched step goes this way:

1. engine.py attaches to the engine; hooks/engine_adapter.py calls it back when DeepSpeed decides on the gradients.
2. hooks/module_hooks.py records each forward in a hooks/batch_record.py, which gives frames (frames/frame.py).
   At level guard that happens only in the replay of a step that overflowed: replay/investigate.py.
3. frames/first_bad.py finds the first bad value; with what else the rank knows it is a RankReport.
4. verdict/verdict.py judges the reports of all ranks and yields findings.
5. announce.py prints them; engine.py keeps them, and raises if the user asked for it.
Beside it: trace_writer.py (level trace), steps.py (losses, counts), debug.py (the guide's class), remedy.py (float32).
"""
