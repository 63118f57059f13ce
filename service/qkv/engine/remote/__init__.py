"""Remote engine: device processes run the jobs of all workers."""
