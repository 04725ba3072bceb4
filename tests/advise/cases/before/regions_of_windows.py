import torch
from torch import nn


class Model(nn.Module):
    def mask(self, x):
        height, width = x.shape[1:3]
        regions = torch.zeros(height, width, device=x.device)
        across = (slice(0, -3), slice(-3, -1), slice(-1, None))
        region = 0
        for rows in (slice(0, -3), slice(-3, -1), slice(-1, None)):
            for columns in across:
                regions[rows, columns] = region  # SVX105
                region += 1
        return regions

    def forward(self, x):
        return x + self.mask(x)[None, :, :, None]


def example_inputs():
    return (torch.randn(2, 7, 9, 3),)
