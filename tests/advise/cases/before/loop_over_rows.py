import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor):
        rows = []
        for row in x:  # SVX102
            rows.append(torch.softmax(row, -1))
        return torch.stack(rows)


def example_inputs():
    return (torch.randn(2, 3, 4),)
