"""Data -> terminal text, JSON documents, progress. Shows, never decides."""
