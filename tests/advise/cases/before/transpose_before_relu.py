import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return F.relu(x.transpose(1, 2)) - (1 + torch.exp((x * 2).transpose(1, 2)))  # SVX205 * SVX205 *


def example_inputs():
    return (torch.randn(2, 3, 4),)
