"""The rules of known failures in logs with their wordings, one file for each topic."""
