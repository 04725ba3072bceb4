import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        batch, _, points = x.shape
        groups, _ = weight.size()
        y = torch.einsum("bcp,gc->bgp", x, weight)
        return y.view(batch, groups, points)


def unknown(x, weight):
    """What is summed may be an axis that was added; and of another tensor of that name the rank is not told."""
    y = (x.unsqueeze(1) * weight[None]).sum(-1)
    x = y.reshape(weight.shape)
    return (x.unsqueeze(0) * weight[:, None]).sum(-1)


def example_inputs():
    return (
        torch.randn(2, 3, 5),
        torch.randn(4, 3),
    )
