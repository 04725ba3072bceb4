import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        return x * weight.unsqueeze(1)


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4),
    )
