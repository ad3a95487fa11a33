"""Where did the first inf come from? Hooks on a DeepSpeed engine -> frames -> a verdict. Importing it imports no torch."""
