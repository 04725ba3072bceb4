import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        y = x.permute(1, 0, 2)
        z = torch.sigmoid(weight).transpose(1, 2)
        return y, z


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4),
    )
