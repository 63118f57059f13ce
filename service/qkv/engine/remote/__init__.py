"""The engine in a process of its own: one device process runs the jobs of all workers."""
