"""Layout meta: wq, wk, wv and wo, each an nn.Linear; grouped key heads.

Source: github.com/meta-llama/llama, model.py, Attention. Its rotary embedding turns neighbouring
channels, so that rows of wq and wk are in another order than in the layout llama.
"""

from __future__ import annotations

MODULES = ("wq", "wk", "wv", "wo")
OUTPUT = "wo"
QUERY = ("wq.weight",)
ROTARY_ORDER = "interleaved"
