"""hiqcache inside SGLang: the only package here that imports sglang.

plugin.py    SGLang's entry point: which hooks this release gets
support.py   whether they are in place, and whether the release is one for them
asking.py    hooks that hear what was asked for, on every release
choice.py    which representation was asked for, by whom; refusing
hooks.py     hooks that serve it
rules.py     server settings that an encoded pool cannot serve under
pool.py      the host pool
proof.py     what a scheduler reports, what the launcher demands
nodes.py     ranks compared over all nodes
metrics.py   the series on the metrics page
cpu.py       SGLang on a machine with no NVIDIA driver
doctor.py    what `hiqcache doctor` asks SGLang
versions.py  the supported releases of SGLang
"""
