import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        bins = torch.arange(8, dtype=x.dtype, device=x.device)  # SVX106
        return (x.softmax(-1) * bins).sum(-1)


def example_inputs():
    return (torch.randn(2, 8),)
