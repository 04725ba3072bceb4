import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bins", torch.arange(8.0))

    def forward(self, x):
        return (x.softmax(-1) * self.bins).sum(-1)


def example_inputs():
    return (torch.randn(2, 8),)
