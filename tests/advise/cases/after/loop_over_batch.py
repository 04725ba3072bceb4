import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor):
        _, rows, _ = x.shape
        return x @ weight, rows


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
