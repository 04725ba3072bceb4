import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = torch.empty(x.shape[0], x.shape[1], 8, dtype=x.dtype, device=x.device)
        y[:, :, 0::2] = x.sin()  # SVX105
        y[:, :, 1::2] = x.cos()
        return y


def example_inputs():
    return (torch.rand(2, 5, 4),)
