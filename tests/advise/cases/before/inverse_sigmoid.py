import torch
from torch import nn


def inverse_sigmoid(x):
    return torch.log(x / (1 - x))  # SVX303


class Model(nn.Module):
    def forward(self, x, y=None):
        return inverse_sigmoid(x), torch.log(x) - torch.log(1 - x), -torch.log(1 / x - 1)  # SVX303 SVX303


def example_inputs():
    return (torch.rand(2, 3) * 0.8 + 0.1,)
