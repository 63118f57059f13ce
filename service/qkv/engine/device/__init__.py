"""The device that runs the jobs: memory, copies, timing and errors. No other code knows devices."""
