import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = x.permute(0, 2, 1).transpose(0, 1)  # SVX206 *
        z = (x + 1).transpose(1, 2).permute(0, 2, 1)  # SVX206 *
        return y, z


def example_inputs():
    return (torch.randn(2, 3, 4),)
