"""Read the files of torch.distributed.checkpoint without running anything in them.

torch unpickles the index of a checkpoint, `.metadata`, and objects that are no tensors, and
so runs whatever a stranger put there. Here the index is read as data and checked, and
objects are read by `torch.load(weights_only=True)`. Tensors are read by that in torch, too.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import io
import math
import os
import stat
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from placements._torch.pickled import Made, Name, NotPlain, exactly, read_pickle
from placements._torch.supported import inside

INDEX = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"


class PlainReader(FileSystemReader):
    """Reads a checkpoint in a directory; what its index says is checked first."""

    @property
    def directory(self) -> Path:
        return Path(cast(Any, self.path))

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the index; ValueError if it is damaged or holds more than an index does.

        It takes no arguments: so torch does not ask it for the index of one rank.
        """
        directory = self.directory
        if not directory.is_dir():
            raise ValueError(f"{directory} is no directory")
        try:
            metadata = _metadata(read_pickle(regular_bytes(directory / INDEX)))
        except NotPlain as error:
            raise ValueError(f"{directory / INDEX} is no index: {error}") from None
        _check_files(directory, metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_plain(self, metadata: Metadata, name: str) -> Any:
        """Return an entry that is no tensor, without those that are."""
        info = metadata.storage_data[MetadataIndex(name)]
        with (self.directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return _plain(io.BytesIO(file.read(info.length)))


class PlainPlanner(DefaultLoadPlanner):
    """Loads what `prepare` makes of the index: a dict as `dcp.load` takes it.

    An error of `prepare` on one rank is an error on all of them.
    """

    def __init__(self, prepare: Callable[[Metadata], dict[str, Any]]) -> None:
        super().__init__()
        self.prepare = prepare

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        super().set_up_planner(self.prepare(metadata), metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = _plain(value)
        # torch unpickles without limits what it is given here: so what it gets is ours.
        rewritten = io.BytesIO()
        torch.save(plain, rewritten)
        rewritten.seek(0)
        super().load_bytes(read_item, rewritten)


def _plain(value: io.BytesIO) -> Any:
    return torch.load(value, map_location="cpu", weights_only=True)


def regular_bytes(path: Path, most: int | None = None) -> bytes:
    """Return what a regular file holds; ValueError for a pipe, a link or anything else."""
    size = regular_size(path)
    if most is not None and size > most:
        raise ValueError(f"{path} has {size} bytes, which is more than {most}")
    return path.read_bytes()


def regular_size(path: Path) -> int:
    """Return the size of a regular file; ValueError for anything else, OSError if none."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    return found.st_size


def _metadata(node: Any) -> Metadata:
    said = _state(node, _MODULE, "Metadata")
    tensors = {_text(k): _stored(k, v) for k, v in _is(said["state_dict_metadata"], dict)}
    infos = {_index(k): _info(v) for k, v in _is(said["storage_data"], dict)}
    wanted = {
        MetadataIndex(name, chunk.offsets)
        for name, one in tensors.items()
        if isinstance(one, TensorStorageMetadata)
        for chunk in one.chunks
    } | {
        MetadataIndex(k) for k, v in tensors.items() if isinstance(v, BytesStorageMetadata)
    }
    if infos.keys() != wanted:
        raise NotPlain("it does not say of every piece where it is")
    version = said.get("version")
    return Metadata(
        tensors,
        _paths(said.get("planner_data")),
        infos,
        None,
        None if version is None else _text(version),
    )


def _stored(name: str, node: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(node, Made) and node.of == Name(_MODULE, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    said = _state(node, _MODULE, "TensorStorageMetadata")
    chunks = [_chunk(one) for one in exactly(said["chunks"], list)]
    size = _size(said["size"])
    _check_pieces(name, size, chunks)
    return TensorStorageMetadata(_properties(said["properties"]), size, chunks)


def _chunk(node: Any) -> ChunkStorageMetadata:
    said = _state(node, _MODULE, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(said["offsets"]), _size(said["sizes"]))


def _properties(node: Any) -> TensorProperties:
    if not isinstance(node, Made) or node.of != Name(_MODULE, "TensorProperties"):
        raise NotPlain(f"it has {node!r} where TensorProperties are needed")
    dtype = exactly(exactly(node.state, tuple)[0], Name)
    found = vars(torch).get(dtype.name) if dtype.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise NotPlain(f"it names {dtype.module}.{dtype.name} as a dtype")
    return TensorProperties(dtype=found)


def _size(node: Any) -> torch.Size:
    if not isinstance(node, Made) or node.of != Name("torch", "Size"):
        raise NotPlain(f"it has {node!r} where torch.Size is needed")
    (sizes,) = node.arguments
    return torch.Size([_count(n) for n in exactly(sizes, tuple)])


def _index(node: Any) -> MetadataIndex:
    said = _state(node, _MODULE, "MetadataIndex")
    offset, hint = said.get("offset"), said.get("index")
    return MetadataIndex(
        _text(said["fqn"]),
        None if offset is None else _size(offset),
        None if hint is None else _count(hint),
    )


def _info(node: Any) -> Any:
    said = _state(node, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    if said.get("transform_descriptors"):
        raise NotPlain("its data are transformed, for example compressed")
    file = _text(said["relative_path"])
    if Path(file).name != file:
        raise NotPlain(f"it names the file {file!r}, which lies elsewhere")
    made = inside("torch.distributed.checkpoint.filesystem._StorageInfo")
    return made(file, _count(said["offset"]), _count(said["length"]))


def _paths(node: Any) -> dict[str, tuple[str | int, ...]] | None:
    """The path in a nested dict of every name."""
    if node is None:
        return None
    for _, path in _is(node, dict):
        if any(type(part) not in (str, int) for part in exactly(path, tuple)):
            raise NotPlain(f"it has the path {path!r}")
    return dict(node)


def _state(node: Any, module: str, name: str) -> dict[str, Any]:
    if not isinstance(node, Made) or node.of != Name(module, name):
        raise NotPlain(f"it has {node!r} where {name} is needed"[:200])
    return exactly(node.state, dict)


def _is(node: Any, kind: type) -> Any:
    return exactly(node, kind).items()


def _text(node: Any) -> str:
    return exactly(node, str)


def _count(node: Any) -> int:
    if exactly(node, int) < 0 or node >= 2**63:
        raise NotPlain(f"it has {node} where a size is needed")
    return node


def _check_pieces(
    name: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]
) -> None:
    """Raise NotPlain unless the pieces make up the tensor, each element once."""
    for chunk in chunks:
        bounds = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(at + n > most for at, n, most in bounds):
            raise NotPlain(f"a piece of {name!r} lies outside of its {list(size)}")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise NotPlain(f"the pieces of {name!r} do not make up its {list(size)}")
    if _overlap([(tuple(c.offsets), tuple(c.sizes)) for c in chunks]):
        raise NotPlain(f"pieces of {name!r} overlap")


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _overlap(boxes: list[_Box]) -> bool:
    """Return whether two of these boxes have an element in common.

    Along each dim in turn, boxes that do not reach each other are taken apart.
    """
    groups = [boxes]
    for dim in range(len(boxes[0][0]) if boxes else 0):
        groups = [part for group in groups for part in _parts(group, dim)]
    return any(len(group) > 1 and _any_pair(group) for group in groups)


def _parts(boxes: list[_Box], dim: int) -> list[list[_Box]]:
    ordered = sorted(boxes, key=lambda box: box[0][dim])
    parts, end = [ordered[:1]], 0
    for before, box in pairwise(ordered):
        end = max(end, before[0][dim] + before[1][dim])
        if box[0][dim] >= end:
            parts.append([])
        parts[-1].append(box)
    return parts


def _any_pair(boxes: list[_Box]) -> bool:
    return any(
        all(
            a < b + m and b < a + n
            for a, n, b, m in zip(*one, *other, strict=True)
        )
        for i, one in enumerate(boxes)
        for other in boxes[:i]
    )  # fmt: skip


def _check_files(directory: Path, metadata: Metadata) -> None:
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        file = info.relative_path
        if file not in sizes:
            sizes[file] = regular_size(directory / file)
        if info.offset + info.length > sizes[file]:
            raise ValueError(f"{directory / file} ends before what {INDEX} says is in it")
