import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor, scales: torch.Tensor):
        return x * scales[:, None]


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.rand(3),
    )


def until(x: torch.Tensor, steps: torch.Tensor):
    """What a loop ends by is not known before it."""
    i = 0
    while i < 8:
        i += steps[i].item()
    while x.abs().max().item() > 1:
        x = x / 2
    while i > 0:
        if x[i].item() < 0:
            break
        i -= 1
    limit = 3
    while i < limit:
        limit -= steps[i].item()
        i += 1
    return x
