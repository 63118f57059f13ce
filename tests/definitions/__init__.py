"""What the variants compute, one head at a time, in plain numpy that shares no code with them."""
