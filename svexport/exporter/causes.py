"""What usually makes a file compute other than its model, as errors of verification say it."""

__all__ = ["EQUAL", "EXPORTED", "HALF", "NOT_FINITE", "OTHERS", "OTHER_TYPE", "SIZES"]

EQUAL = (
    "Some values are equal; torch may return them in any order, ONNX returns them by position: {}. "
    "Nothing else differs. Use torch.sort(x, dim=-1, descending=True, stable=True), or values never equal"
)
NOT_FINITE = (
    "{} elements of torch's result are NaN or infinite, {} of the file's: a number became too large "
    "for its type, or was divided by zero, where runtimes may differ"
)
OTHER_TYPE = (
    "torch's result is {}: the exporter has lost that; the other one (opset 17 or less, 18 or more) may keep it"
)
SIZES = (
    "Usual causes: sizes that forward uses as numbers, as math.log2(x.shape[0]) does, or Python branches "
    "on them (traced once, with dynamic sizes of 2 or more)"
)
EXPORTED = "Usual cause: forward asks whether it is exported, and the file goes the way of that, at {}"
HALF = (
    "half precision itself, in which every runtime rounds its own way (give rtol and atol to allow more, or "
    "keep='auto' to compute in float32 what loses most; argmax and topk may choose another of nearly equal values), "
)
OTHERS = (
    "random numbers or data-dependent Python branches in forward (traced once, for the given inputs, with dynamic "
    "sizes of 2 or more)"
)
