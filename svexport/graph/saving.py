"""Writes models as files: into a temporary folder first, then renamed, so that no half-written file is left."""

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
"""Suffix of the name of a dynamic size that must not be 0, in a line of the file's ``doc_string``."""

MAX_PROTOBUF_BYTES = 2**31 - 2**20
"""Larger models keep their weights in a file beside the ``.onnx``: protobuf allows at most 2 GiB."""

_NO_PLACE = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS}
"""Errors of writing: an exceeded quota or file size, a full disk, a read-only file system."""


def check_name(path: Path) -> None:
    """Raises an ExportError if a name does not end in .onnx, by which loaders recognize the format."""
    if path.suffix.lower() != ".onnx":
        raise ExportError(f"expected the name of an ONNX file, such as model.onnx; got {str(path)!r}")


def check_place(path: Path) -> None:
    """Raises an ExportError if an ONNX file cannot be written to ``path``."""
    if "\0" in str(path):
        raise ExportError(f"expected the path of a file, got {str(path)!r}, with a NUL in it; take that out")
    try:
        if path.is_dir():
            raise ExportError(f"expected the path of a file, got the folder {path}; add a file name")
        if path.exists() and not path.is_file():  # a pipe or a device; renaming onto it would replace it
            raise ExportError(
                f"expected the path of a file, got {path}, which is no regular file; choose another place"
            )
    except OSError as error:  # for example, the name is too long
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
        if error.errno not in _NO_PLACE:  # other OSErrors may come from the user's code
            raise
        raise ExportError(
            f"cannot write {path}: {error.strerror}; make room there, or choose another folder. No file was written"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model to a temporary folder and renames it into place, so a file of that name is always complete."""
    check_place(path)
    with beside(path) as folder:
        save(model, folder / path.name)
        move(folder, path)


def move(folder: Path, path: Path) -> None:
    """Moves the files of a folder to the folder of ``path``; an older file stays if that fails."""
    try:
        for file in sorted(folder.iterdir(), key=lambda f: f.name == path.name):  # the .onnx last, after its data
            os.replace(file, path.parent / file.name)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


def save(model: onnx.ModelProto, file: Path) -> None:
    """Writes a model, with its weights in a second file if one protobuf cannot hold them; ``model`` is not changed."""
    import onnx

    from svexport.graph.scope import byte_size
    from svexport.graph.wire import write_model

    for data in file.parent.glob("*"):  # files that the exporter left, which are loaded by now
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
    """Changes only the ``doc_string`` of a file, by appending a second one: protobuf reads the last of a repeated
    scalar field."""
    import onnx

    with file.open("ab") as stream:
        stream.write(onnx.ModelProto(doc_string=text).SerializeToString())


def strip_file(file: Path) -> int:
    """Removes the bodies from a file and returns the IR version that it has then."""
    import onnx

    from svexport.graph.bodies import strip

    model = onnx.load(str(file))
    strip(model)
    save(model, file)
    return model.ir_version
