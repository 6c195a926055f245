"""A dump's values as BF16 tensors in a safetensors file of its own."""

from collections.abc import Callable
from pathlib import Path

from hiqcache.geometry import Part
from hiqcache.inspect.reader import Dump
from hiqcache.inspect.writer import SafetensorsWriter, TensorSpec


def write_decoded(dump: Dump, file: Path, progress: Callable[[int], None] = lambda steps: None) -> None:
    """Write tensors `k` and `v`, `[layer, page, page_size, heads, dim]`, and the dump's metadata.

    Args:
        dump: open.
        file: does not exist yet.
        progress: told of each layer of each part that is done, twice as many as there are layers.

    Raises:
        DumpError: as `Dump.representation` and `SafetensorsWriter`.
    """
    representation, geometry = dump.representation(), dump.geometry
    specs = [
        TensorSpec(
            part.value,
            geometry.dtype,
            (geometry.layers, dump.pages, geometry.page_size, geometry.heads, geometry.dim(part)),
        )
        for part in Part
    ]
    text = dump.metadata.to_text()
    text["hiqcache.decoded"] = text.pop("hiqcache.dump")  # it is no dump: whoever opens it as one is told so
    with SafetensorsWriter(file, specs) as writer:
        writer.begin(text)
        for part in Part:
            for layer in range(geometry.layers):
                for pages in dump.chunks():
                    writer.write(part.value, dump.decode(representation, part, layer, pages), layer, pages.start)
                progress(1)
        writer.finish()
        writer.commit()
