"""Every function of PyTorch's own table of samples, exported at every opset and compared with torch.

``python -m tests.sweep`` runs what is not in ``results.jsonl`` yet, and writes ``docs/opsets.md``.
"""
