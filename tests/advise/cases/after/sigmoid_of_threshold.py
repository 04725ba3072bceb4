import torch
from torch import nn

import svexport


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_threshold = 2.1972246

    def forward(self, x):
        return svexport.ops.sigmoid_gt(x, 0.7) & (x < self.logit_threshold)


def example_inputs():
    return (torch.randn(2, 3, 4),)
