import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, left, right):
        n, _, h, w = left.shape
        padded = F.pad(right, (1, 1, 1, 1))
        cost = left.new_zeros(n, 9, h, w)
        for i in range(3):
            for j in range(3):
                cost[:, i * 3 + j] = (left * padded[:, :, i : i + h, j : j + w]).mean(1)  # SVX105
        return cost


def example_inputs():
    return torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
