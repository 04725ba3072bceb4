"""What each TensorRT parses of an ONNX file, as data.

``operators``: one line per ONNX op (first version, types, restrictions). ``rules``: what a restriction asks of a node.
``opsets``: what a newer opset says that an older one does not. ``datatypes``: the types of tensors. ``target``:
versions, opsets, bodies. ``node``: what is known of a node without running it. :func:`svexport.check` holds a file to
them.

How it is known: NVIDIA's parser (onnx/onnx-tensorrt) of 8.4, 8.5, 8.6, 9.3, 10.0 and 10.1, compiled together with a
host of ours in the place of TensorRT's library, was run on all backend tests of ONNX and on the models of
``tests/tensorrt/test_support.py`` (``tests/tensorrt/parser``). What it refuses is an ``error`` there, what it takes for
something else ``silent``. That proves parsing, not building: ``builder`` is what the headers say of a layer. Sources
were read at 8.2, 9.0 to 9.2 and, in part, 10.15; types, restrictions ``documented`` and the versions between are from
docs/operators.md, changelog and release notes up to 11.5: a restriction without ``before`` is assumed to hold for what
is newer than 10.1. Where sources and documentation differ, the sources count.
"""
