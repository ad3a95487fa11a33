"""What several rooms know of ranks and of jobs."""
