"""Capture and substitution of the attention of a user's torch model."""
