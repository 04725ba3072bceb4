import torch
from torch import nn


def inverse_sigmoid(x, eps=1e-5):
    return torch.logit(x, eps=eps)


class Model(nn.Module):
    def forward(self, x, y=None):
        x = x.clamp(1e-5, 1 - 1e-5)
        return inverse_sigmoid(x), torch.log(x) - torch.log(1 - x), -torch.log(1 / x - 1)


def example_inputs():
    return (torch.rand(2, 3) * 0.8 + 0.1,)
