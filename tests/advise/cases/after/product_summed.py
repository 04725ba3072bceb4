import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        a = x @ weight
        b = torch.einsum("bik,bkj->bij", x, weight)
        return a, b


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
