import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x, weight: torch.Tensor):
        return torch.stack([self.act(x[i]) @ weight[i] for i in range(x.shape[0])])  # SVX102


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
