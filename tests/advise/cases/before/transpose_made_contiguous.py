import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, weight):
        y = x.permute(0, 2, 1).contiguous()
        z = torch.sigmoid(weight.transpose(1, 2).contiguous())  # SVX205
        return y.permute(2, 0, 1), z  # SVX206


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4),
    )
