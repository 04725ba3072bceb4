import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])

    def forward(self, x):
        return x - self.mean


def example_inputs():
    return (torch.rand(2, 3, 4, 4),)
