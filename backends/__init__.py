"""The representations, one file each. `bf16.py` is the shortest: copy it to write another."""
