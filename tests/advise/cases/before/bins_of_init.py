import torch
from torch import nn


class Bins(nn.Module):
    def __init__(self, count=16, near=1.0):
        super().__init__()
        self.count, self.near = count, near

    def centers(self, x):
        last = self.count - 1
        return self.near + torch.arange(0, last + 1, device=x.device)  # SVX106


class Model(Bins):
    def forward(self, x):
        return x.softmax(-1) @ self.centers(x)


def example_inputs():
    return (torch.randn(3, 5, 16),)
