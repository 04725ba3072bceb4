import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor):
        batch, rows, _ = x.shape
        products = []
        for b in range(batch):  # SVX102
            products.append(x[b] @ weight[b])
        return torch.stack(products), rows


def example_inputs():
    return (
        torch.randn(2, 3, 4),
        torch.randn(2, 4, 5),
    )
