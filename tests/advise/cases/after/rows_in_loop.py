import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        return torch.einsum("bik,ikj->bij", x, weight)


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(3, 4, 5),
    )
