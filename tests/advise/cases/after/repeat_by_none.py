import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        bias = weight[:, None]
        mask = weight[..., None, :] > x
        return torch.where(mask, x, bias)


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4),
    )
