import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.tensor([1.5, 2.5, 3.5]))
        self.register_buffer("sizes", torch.tensor([1.0, 2.0, 4.0]))

    def forward(self, x):
        return x * self.anchors + self.sizes


def example_inputs():
    return (torch.rand(2, 3),)
