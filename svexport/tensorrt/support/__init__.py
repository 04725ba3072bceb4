"""What each TensorRT version parses of an ONNX file, as data.

``operators``: one line per ONNX op (first version, types, restrictions). ``rules``: the checks of restrictions.
``opsets``: node features that a newer opset adds. ``datatypes``: the types of tensors. ``target``: versions, opsets,
bodies. ``node``: the facts about a node that are known without running it. :func:`svexport.check` applies them to a
file.

Evidence: NVIDIA's parser (onnx/onnx-tensorrt) of 8.4, 8.5, 8.6, 9.3, 10.0 and 10.1, compiled with a host of ours that
replaces TensorRT's library, was run on all backend tests of ONNX and on the models of
``tests/tensorrt/test_support.py`` (``tests/tensorrt/parser``). What it refuses is an ``error`` there, what it
misinterprets is ``silent``. This proves parsing, not building: ``builder`` is what the headers say about a layer.
Sources were read at 8.2, 9.0 to 9.2 and, in part, 10.15. Types, ``documented`` restrictions and the versions between
are from docs/operators.md, changelog and release notes up to 11.5; a restriction without ``before`` is assumed to hold
for versions after 10.1. Where sources and documentation differ, the sources count.
"""
