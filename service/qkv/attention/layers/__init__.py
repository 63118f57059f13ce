"""Layers: projections around a variant, the weight layouts they come in, and their conversion.

A module here named in `LAYOUTS` is a layout: `read` takes its tensors to `Projections`, `write`
takes them back.
"""
