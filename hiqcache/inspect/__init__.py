"""Encoded KV in files: writing a pool to safetensors, and looking at what is in there. Nothing here imports SGLang."""
