import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.score_threshold = 0.9

    def forward(self, x):
        scores = torch.sigmoid(x)  # SVX302
        return (x.sigmoid() > 0.7) & (scores < self.score_threshold)  # SVX302


def example_inputs():
    return (torch.randn(2, 3, 4),)
