import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Sigmoid()

    def forward(self, x):
        return self.act(x) >= 0.5, self.act(x.permute(1, 0, 2))  # SVX302 SVX205 *


def example_inputs():
    return (torch.randn(2, 3, 4),)
