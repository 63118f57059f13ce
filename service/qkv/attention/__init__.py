"""The attention variants, one per file: tensors in, tensors out.

A module here whose name has no leading underscore is a variant, and its name is the variant's
name. Nothing in this package knows of HTTP, queues or devices. CONVENTIONS.md says what a variant
file holds; `qkv.catalogue` reads it.
"""
