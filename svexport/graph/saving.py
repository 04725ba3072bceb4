"""Saves models: a file is written under another name and then moved, so that it is never incomplete."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from svexport.errors import ExportError

if TYPE_CHECKING:
    import onnx

__all__ = ["FROM_ONE", "beside", "check_name", "check_place", "describe", "move", "save", "strip_file", "write"]

FROM_ONE = ": sizes from 1"
"""Behind the name of a dynamic size that may not be 0, in a line of a file's ``doc_string``."""

MAX_PROTOBUF_BYTES = 2**31 - 2**20
"""Larger models keep their weights in a file beside the ``.onnx``: protobuf ends at 2 GiB."""

_NO_PLACE = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS}
"""Errors of writing: a quota, a limit of file sizes, a full disk, one that is read only."""


def check_name(path: Path) -> None:
    """Raises an ExportError where a name does not end in .onnx, by which loaders know what a file is."""
    if path.suffix.lower() != ".onnx":
        raise ExportError(f"expected the name of an ONNX file, such as model.onnx; got {str(path)!r}")


def check_place(path: Path) -> None:
    """Raises an ExportError where an ONNX file cannot be written to ``path``."""
    if "\0" in str(path):
        raise ExportError(f"expected the path of a file, got {str(path)!r}, with a NUL in it; take that out")
    try:
        if path.is_dir():
            raise ExportError(f"expected the path of a file, got the folder {path}; add a file name")
        if path.exists() and not path.is_file():  # a pipe or a device, which a renamed file would replace
            raise ExportError(
                f"expected the path of a file, got {path}, which is no regular file; choose another place"
            )
    except OSError as error:  # too long a name, say
        raise ExportError(f"cannot write {path}: {error.strerror or error}; choose another name") from error
    check_name(path)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary folder next to the file, so that the finished one can be renamed into place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}; choose a writable folder") from error
    try:
        yield folder
    except OSError as error:
        if error.errno not in _NO_PLACE:  # the user's code may raise others
            raise
        raise ExportError(
            f"cannot write {path}: {error.strerror}; make room there, or choose another folder. No file was written"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model beside its place and moves it there: a file of that name is whole at any time."""
    check_place(path)
    with beside(path) as folder:
        save(model, folder / path.name)
        move(folder, path)


def move(folder: Path, path: Path) -> None:
    """Moves the files of a folder next to ``path`` to their final place; older files stay if that fails."""
    try:
        for file in sorted(folder.iterdir(), key=lambda f: f.name == path.name):  # the .onnx last, after its data
            os.replace(file, path.parent / file.name)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


def save(model: onnx.ModelProto, file: Path) -> None:
    """Writes a model, its weights beside it where they do not fit into one protobuf. ``model`` keeps its weights."""
    import onnx

    from svexport.graph.scope import byte_size
    from svexport.graph.wire import write_model

    for data in file.parent.glob("*"):  # what the exporter left, loaded by now
        data.unlink()
    size = sum(map(byte_size, model.graph.initializer))
    if size < MAX_PROTOBUF_BYTES:
        with file.open("wb") as stream:
            write_model(model, stream)
        return
    outside = onnx.ModelProto()
    outside.CopyFrom(model)
    onnx.save(outside, str(file), save_as_external_data=True, location=f"{file.name}.data", size_threshold=1024)


def describe(file: Path, text: str) -> None:
    """Changes only the ``doc_string`` of a file, by appending the field: protobuf reads the last of two equal
    fields."""
    import onnx

    with file.open("ab") as stream:
        stream.write(onnx.ModelProto(doc_string=text).SerializeToString())


def strip_file(file: Path) -> int:
    """Takes the bodies off a file, and says which IR version it has then."""
    import onnx

    from svexport.graph.bodies import strip

    model = onnx.load(str(file))
    strip(model)
    save(model, file)
    return model.ir_version
