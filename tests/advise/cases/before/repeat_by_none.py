import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        n = x.shape[1]
        bias = weight[:, None].repeat((1, n, 1))  # SVX201 *
        mask = weight[..., None, :].repeat(1, n, 1) > x  # SVX201 *
        return torch.where(mask, x, bias)


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4),
    )
