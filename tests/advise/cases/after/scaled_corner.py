import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return torch.cat((x[..., :2] * 2, x[..., 2:]), -1), F.pad(x[:, :-1], (0, 0, 1, 0), value=1)


def example_inputs():
    return (torch.rand(2, 5, 4),)
