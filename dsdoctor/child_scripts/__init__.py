"""Scripts that dsdoctor runs as child processes, in the interpreter that it examines. They use stdlib, torch and op_builder only.

Each prints its answer as JSON lines that begin with ``DSDOCTOR ``, so that output of torch or DeepSpeed is not mistaken for it.
Nothing here imports dsdoctor, and dsdoctor imports nothing from here.
"""
