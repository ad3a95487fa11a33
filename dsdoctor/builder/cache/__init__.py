"""Files and facts under a key -> a cache entry, and back: the compiled ops and finished wheels that were kept."""
