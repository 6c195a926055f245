"""hiqcache inside SGLang: the only package here that imports sglang.

plugin.py    what is hooked, and nothing else
choice.py    which representation was asked for, by whom; refusing
rules.py     server settings that an encoded pool cannot serve under
pool.py      the host pool
proof.py     what a scheduler reports, what the launcher demands
metrics.py   the series on the metrics page
cpu.py       SGLang on a machine with no NVIDIA driver
doctor.py    what `hiqcache doctor` asks SGLang
versions.py  SGLang's versions that were tested
"""
