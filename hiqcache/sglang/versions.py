"""The SGLang releases that hiqcache supports; imports nothing, so that it can be asked anywhere."""

TESTED_SGLANG = ("0.5.23",)
ALLOW_UNTESTED = "HIQCACHE_ALLOW_UNTESTED_SGLANG"
"""Set to 1 before SGLang loads its plugins, tries another release instead of refusing it."""


def supported(release: str, allow_untested: bool) -> bool:
    """Whether hiqcache's hooks are to be installed in this release of SGLang."""
    return release in TESTED_SGLANG or allow_untested
