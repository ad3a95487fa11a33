"""A DeepSpeed engine or any module -> a watch on it. A watched step goes this way:

1. engine.py attaches to the engine; hooks/engine.py calls it back when DeepSpeed decides on the gradients.
2. hooks/module_hooks.py records each forward, which gives frames (frames/frame.py). At level guard that happens only in the
   replay of a step that overflowed: replay/investigate.py.
3. frames/first_bad.py finds the first bad value, replay/provenance.py follows it back to the operation that made it, to the
   collective that brought it, or to a buffer or weight that held it before; with what else the rank knows it is a RankReport.
4. decisions.py gathers the reports of all ranks, verdict/verdict.py judges them and yields findings.
5. findings.py prints and keeps them; decisions.py raises if the user asked for it.

history.py keeps what explains a later step: losses, overflows, learning rates, updates, weights, inputs;
replay/underflow.py has what float16 flushes, replay/remedy.py whether float32 helps, loss_line.py and loss_graph.py a loss that the
script computes, tracer.py level trace, debug.py the guide's class.
"""
