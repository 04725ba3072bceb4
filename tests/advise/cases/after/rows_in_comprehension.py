import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x, weight: torch.Tensor):
        return self.act(x) @ weight


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
