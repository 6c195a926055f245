"""Launching a Triton kernel whose constants never change."""

from typing import Any

import torch


class Launcher:
    """A kernel bound to its constants; after the first call, launches skip Triton's search for the right variant.

    That search costs more than the launch, 60 microseconds for a kernel of sixteen parameters. Skipping it is sound
    because no argument picks another variant: the kernels specialise on nothing that a transfer can change.

    Args:
        kernel: a `@triton.jit` function, its constants last.
        num_warps: of each program.
        constants: its `tl.constexpr` parameters.
    """

    def __init__(self, kernel: Any, num_warps: int, **constants: object):
        # A product and a sum that are fused into one rounding would differ from what plain PyTorch gives.
        self._kernel, self._options = kernel, {**constants, "num_warps": num_warps, "enable_fp_fusion": False}
        self._constants = [constants[name] for name in kernel.arg_names if name in constants]
        self._compiled: Any = None

    def changed(self, **constants: object) -> "Launcher":
        """The same kernel with other constants, not compiled yet."""
        options = {**self._options, **constants}
        return Launcher(self._kernel, **options)  # type: ignore[arg-type]  # num_warps is an int

    def __call__(self, grid: tuple[int, int, int], stream: torch.cuda.Stream | None, *args: object) -> None:
        """Launch on a stream; the first call compiles, and launches on the current stream."""
        if self._compiled is None:
            self._compiled = self._kernel[grid](*args, **self._options)  # None in Triton's interpreter
        else:
            # Bare addresses spare the driver a question about each tensor.
            bare = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self._compiled[grid](*bare, *self._constants, stream=stream and stream.cuda_stream)
