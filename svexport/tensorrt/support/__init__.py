"""What each TensorRT parses of an ONNX file, as data.

``operators``: one line per ONNX op (first version, types, restrictions). ``rules``: what a restriction asks of a node.
``datatypes``: the types of tensors. ``target``: versions, opsets, bodies. ``node``: what is known of a node without
running it. :func:`svexport.check` holds a file to them.

How it is known, for every line: first versions and restrictions that name an error are read from the sources of the
parser (onnx/onnx-tensorrt) at 8.2, 8.4, 8.5, 8.6, 9.0 to 9.3, 10.0, 10.1 and, in part, 10.15; types, restrictions
``documented`` and the versions between from its docs/operators.md, changelog and release notes up to 11.5. None of it
has been run on TensorRT. Where sources and documentation differ, the sources count.
"""
