"""Functions that variants share: score blocks, feature sums, masks, gradients, dropout."""
