"""Scripts that run inside the interpreter that is looked at, as child processes: stdlib, torch and op_builder only.

Each prints one JSON line that begins with ``DSDOCTOR `` so that whatever torch or DeepSpeed print cannot be mistaken
for the answer. Nothing here imports dsdoctor, and dsdoctor imports nothing from here.
"""
