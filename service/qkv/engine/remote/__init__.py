"""Remote engine: one device process runs the jobs of all workers."""
