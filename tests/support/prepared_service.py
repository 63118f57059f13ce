"""What forks of `forked_commands` begin with: the imports of a service, and models of bodies."""

import gc
from importlib import import_module

from qkv.api.app import build_models

for module in ("qkv.cli.main", "qkv.server.startup", "qkv.server.worker"):
    import_module(module)
build_models()
gc.collect()
gc.freeze()  # each fork would visit all of it, and copy its pages
