"""Layers: projections around a variant, their weight layouts, and the conversion of layouts.

A module named in `LAYOUTS` is a layout: `read` converts its tensors to `Projections`, `write`
converts them back.
"""
