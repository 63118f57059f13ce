"""Runs jobs: admission, work queue, batches, and the thread that owns the device."""
