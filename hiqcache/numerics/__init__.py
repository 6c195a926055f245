"""Arithmetic that representations share, in plain PyTorch and, in `tiles`, for the GPU kernels, with the same bits.

rotation    a Hadamard rotation of each head, which spreads its outliers over all of its values
planes      integers of fewer than 8 bits, packed into bytes
scales      scales with few mantissa bits
groups      4-bit codes with a one-byte scale for each group of values
tiles       all of it as Triton functions on tiles; importing it needs Triton
"""
