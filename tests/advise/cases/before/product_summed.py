import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        a = (x.unsqueeze(-1) * weight.unsqueeze(-3)).sum(-2)  # SVX301
        b = torch.sum(x[:, :, :, None] * weight[:, None, :, :], dim=2)  # SVX301
        return a, b


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
