"""The types that TensorRT documents, keyed by the words that ``operators`` uses for them."""

from __future__ import annotations

from svexport.tensorrt.support.target import Version, version

# (type, first version, first version that does not document it any more)
_TYPES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "float": (("FLOAT", "0.0", "99.0"), ("FLOAT16", "0.0", "99.0"), ("BFLOAT16", "9.0", "99.0")),
    "half": (("FLOAT", "0.0", "99.0"), ("FLOAT16", "0.0", "99.0")),
    "int": (("INT32", "0.0", "99.0"), ("INT64", "9.0", "99.0")),
    "int8": (("INT8", "0.0", "10.0"),),  # from 10 on only for quantized tensors
    "uint8": (("UINT8", "0.0", "99.0"),),
    "bool": (("BOOL", "0.0", "99.0"),),
    "quantized": (
        ("INT8", "0.0", "99.0"),
        ("FLOAT8E4M3FN", "9.0", "99.0"),
        ("INT4", "10.0", "99.0"),
        ("FLOAT4E2M1", "10.8", "99.0"),
    ),
}


def allowed_types(words: str, of: Version) -> list[str]:
    """The types that ``"float int@8.6"`` means in a version; ``@`` gives the first version that a word applies to."""
    types = []
    for word in words.split():
        name, _, since = word.partition("@")
        if of >= version(since or "0.0"):
            types += [kind for kind, first, until in _TYPES[name] if version(first) <= of < version(until)]
    return types
