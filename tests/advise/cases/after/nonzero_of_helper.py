import torch
from torch import nn


def active(x: torch.Tensor):
    return (x > 0).to(x.dtype)


class Model(nn.Module):
    def forward(self, x):
        return (x * active(x)).sum()


def example_inputs():
    return (torch.randn(5, 3),)
