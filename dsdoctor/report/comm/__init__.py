"""What a communication test found -> terminal lines and a page."""
