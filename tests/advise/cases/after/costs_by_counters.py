import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, left, right):
        _, _, h, w = left.shape
        padded = F.pad(right, (1, 1, 1, 1))
        planes = [(left * padded[:, :, i : i + h, j : j + w]).mean(1) for i in range(3) for j in range(3)]
        return torch.stack(planes, 1)


def example_inputs():
    return torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
