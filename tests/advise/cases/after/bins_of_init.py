import torch
from torch import nn


class Bins(nn.Module):
    def __init__(self, count=16, near=1.0):
        super().__init__()
        self.register_buffer("centers", near + torch.arange(0, count), persistent=False)


class Model(Bins):
    def forward(self, x):
        return x.softmax(-1) @ self.centers


def example_inputs():
    return (torch.randn(3, 5, 16),)
