import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        center = x[:, [0, 1]] * 2  # SVX204 *
        last = torch.cat((x[..., [-2, -1]], x[..., [0, 2]]), -1)  # SVX204 * SVX204 *
        size = x[:, [2, 3]]  # SVX204
        return center, last, size


def example_inputs():
    return (torch.rand(2, 4),)
