"""The report of a communication test -> terminal lines and an HTML page."""
