"""The transformer decoder in parts: its configuration, its layers on tensors, its gradients."""
