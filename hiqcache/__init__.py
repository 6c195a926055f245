"""hiqcache: SGLang's host KV cache (HiCache L2) in a smaller representation."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hiqcache")
except PackageNotFoundError:  # imported from a tree that nobody installed
    __version__ = "0+unknown"
