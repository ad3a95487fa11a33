"""Which rank this process is, by its launcher's variables; and starting ranks: commands, scripts, processes."""
