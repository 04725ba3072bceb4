import torch
from torch import nn


class Model(nn.Module):
    def mask(self, x):
        height, width = x.shape[1:3]
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        rows = (rows >= height - 3).int() + (rows >= height - 1).int()
        columns = (columns >= width - 3).int() + (columns >= width - 1).int()
        return (3 * rows[:, None] + columns).float()

    def forward(self, x):
        return x + self.mask(x)[None, :, :, None]


def example_inputs():
    return (torch.randn(2, 7, 9, 3),)
