import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        top_left = x[..., ::2, ::2]
        top_right = x[..., ::2, 1::2]
        bottom_left = x[..., 1::2, ::2]
        bottom_right = x[..., 1::2, 1::2]
        x = torch.cat((top_left, bottom_left, top_right, bottom_right), dim=1)  # SVX203 *
        return x + 1


def example_inputs():
    return (torch.randn(2, 3, 4, 6),)
