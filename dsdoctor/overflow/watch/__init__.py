"""A DeepSpeed engine or any module -> a watch on it. A watched step goes this way:

1. engine.py attaches to the engine; hooks/engine_adapter.py calls it back when DeepSpeed decides on the gradients.
2. hooks/module_hooks.py records each forward in a hooks/batch_record.py, which gives frames (frames/frame.py).
   At level guard that happens only in the replay of a step that overflowed: replay/investigate.py.
3. frames/first_bad.py finds the first bad value, replay/provenance.py follows it back to the operation that made it, or to the
   collective that brought it, or to a buffer or weight that held it before (replay/held.py); with what else the rank knows it
   is a RankReport.
4. decisions.py gathers the reports of all ranks, verdict/verdict.py judges them and yields findings.
5. announce.py prints them; found.py keeps them; decisions.py raises if the user asked for it.
Beside it: loss_line.py (a loss that the script computes), small.py (which steps are looked at for what is too small; updates),
replay/underflow.py and replay/vanished.py (gradients and activations that float16 flushes), growth.py, trace_writer.py
(level trace), steps.py (losses, counts), debug.py (the guide's class), remedy.py (float32).
"""
