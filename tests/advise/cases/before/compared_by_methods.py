import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.threshold = 0.1

    def forward(self, x):
        kept = x.transpose(1, 2).gt(0.5)  # SVX205 *
        y = self.head(x).permute(0, 2, 1)
        return kept, y < self.threshold, torch.sigmoid(x).le(0.25)  # SVX205 SVX302


def example_inputs():
    return (torch.randn(2, 3, 4),)
