"""Machine + Wish -> BuildPlan -> wheel + Manifest. ``plan`` decides and is pure; ``source``, ``toolkit`` and ``make`` act."""
