"""Exports every function of PyTorch's own table of samples at every opset and compares it with torch.

``python -m tests.sweep`` runs what is not in ``results.jsonl`` yet, and writes ``docs/opsets.md``.
"""
