"""Who is this rank, by its launcher's variables; and how ranks are started: commands, scripts, processes."""
