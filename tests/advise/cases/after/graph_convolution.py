import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, adjacency):
        return torch.einsum("nkctv,kvw->nctw", x, adjacency)


def example_inputs():
    return (
        torch.randn(2, 3, 4, 5, 6),
        torch.randn(3, 6, 6),
    )
