"""What forks of `forked_commands` begin with: the imports of a service, and models of bodies.

torch imports the last two when it first meets tensors of `pretended_device`, which took 1.3 s of a
processor in each process with such a device.
"""

import gc
from importlib import import_module

from qkv.api.app import build_models

for module in (
    "qkv.cli.main", "qkv.server.startup", "qkv.server.worker",
    "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes",
):  # fmt: skip
    import_module(module)
build_models()
gc.collect()
gc.freeze()  # each fork would visit all of it, and copy its pages
