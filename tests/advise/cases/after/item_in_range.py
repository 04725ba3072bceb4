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
