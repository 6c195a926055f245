"""The SGLang versions that hiqcache has been tested with; imports nothing, so that it can be asked anywhere."""

TESTED_SGLANG = ("0.5.23",)
ALLOW_UNTESTED = "HIQCACHE_ALLOW_UNTESTED_SGLANG"
"""Set to 1, turns the refusal of another version into a warning."""
