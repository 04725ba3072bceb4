import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.eye(3))
        self.register_buffer("bins", torch.logspace(-1, 2, 4))

    def forward(self, x):
        return (x @ self.turn)[..., None] * self.bins


def example_inputs():
    return (torch.randn(2, 5, 3),)
