import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor):
        norms = x.new_zeros(())
        for layer in self.layers:
            x = torch.relu(layer(x))
            norms = norms + x.norm()
        return x, norms


def example_inputs():
    return (torch.randn(2, 4),)
