import numpy as np
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = [1.0, 2.0, 4.0]

    def forward(self, x):
        anchors = torch.from_numpy(np.array([1.5, 2.5, 3.5], dtype=np.float32)).to(x.device)  # SVX106
        sizes = torch.tensor(self.sizes, device=x.device)  # SVX106
        return x * anchors + sizes


def example_inputs():
    return (torch.rand(2, 3),)
