import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        best = x.topk(3, dim=1).indices.permute(0, 2, 3, 1)
        return best, x.flatten(1).gather(1, best.flatten(1))


def example_inputs():
    return (torch.randn(2, 8, 5, 7),)
