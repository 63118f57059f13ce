"""The Python client and the objects it returns. Works without torch."""
