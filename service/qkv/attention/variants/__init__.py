"""The attention variants, one file each: tensors in, tensors out.

A module here whose name has no leading underscore is a variant; its name is the variant's name.
README.md here lists the parts of a variant file. `qkv.attention.catalogue` reads them.
"""
