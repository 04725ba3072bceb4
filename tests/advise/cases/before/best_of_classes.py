import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        scores = x.softmax(1).permute(0, 2, 3, 1)
        best = scores.topk(3, dim=-1).indices  # SVX304
        rows, chosen = x.flatten(1), best.flatten(1)
        picked = torch.stack([row[i] for row, i in zip(rows, chosen)])  # SVX102
        return best, picked


def example_inputs():
    return (torch.randn(2, 8, 5, 7),)
