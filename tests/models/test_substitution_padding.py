"""Tests that the padding of a batch changes nothing in a model with a substitute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import qkv

LENGTHS = (3, 7, 5)


class Attention(nn.Module):
    """Attention over the first positions of each item."""

    def forward(self, x_BHLD: Tensor, lengths_B: Tensor) -> Tensor:
        """Returns the attention of x to itself."""
        visible_BL = torch.arange(x_BHLD.shape[2]) < lengths_B[:, None]
        mask_BHLS = visible_BL[:, None, None].expand(-1, 1, x_BHLD.shape[2], -1)
        return scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD, mask_BHLS)


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "linear", "taylor", "efficient"])
@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
def test_padding_changes_nothing(variant: str, heads: list[int] | None) -> None:
    """`sigmoid` has a default bias of -log S, so it must not count the keys of the padding."""
    torch.manual_seed(0)
    x_BHLD, model = torch.randn(len(LENGTHS), 2, max(LENGTHS), 4), Attention()
    with qkv.substitute(model, {"variant": variant, "heads": heads}):
        together = model(x_BHLD, torch.tensor(LENGTHS))
        for n, length in enumerate(LENGTHS):
            alone = model(x_BHLD[n : n + 1, :, :length], torch.tensor([length]))
            # two orders of at most 7 additions of products of at most 4 terms
            bound = 2 * (max(LENGTHS) + 4) * torch.finfo(torch.float32).eps
            largest = float(x_BHLD.abs().max())
            assert float((together[n, :, :length] - alone[0]).abs().max()) <= bound * largest
