import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        y = x.new_zeros(2, 3, 5)
        for i in range(3):
            y[:, i] = x[:, i] @ weight[i]  # SVX105
        return y


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(3, 4, 5),
    )
