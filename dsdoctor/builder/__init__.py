"""Machine + BuildRequest -> BuildPlan -> wheel + Manifest. ``plan`` decides (pure); ``source``, ``toolkit``, ``make`` act."""
