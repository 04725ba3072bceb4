import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        batch, _, points = x.shape
        groups, _ = weight.size()
        y = (x.unsqueeze(1) * weight[None, :, :, None]).sum(-2)  # SVX301
        return y.view(batch, groups, points)


def example_inputs():
    return (
        torch.randn(2, 3, 5),
        torch.randn(4, 3),
    )
