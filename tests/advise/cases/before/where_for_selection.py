import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, scores):
        kept = torch.where(scores > 0.3)[0]  # SVX104
        return (x[kept] * scores[kept, None]).sum(0)


def example_inputs():
    return (
        torch.randn(5, 3),
        torch.rand(5),
    )
