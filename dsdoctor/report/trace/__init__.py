"""What the trace commands found -> terminal lines, documents and plots."""
