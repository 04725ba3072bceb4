import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        turn = torch.eye(3, device=x.device)  # SVX106
        bins = torch.logspace(-1, 2, 4, device=x.device)  # SVX106
        return (x @ turn)[..., None] * bins


def example_inputs():
    return (torch.randn(2, 5, 3),)
