"""The entry point `sglang.srt.plugins`: which hooks this release of SGLang gets.

Whoever asks for a representation is heard on every release of SGLang that has plugins. The hooks that serve one are
imported only where they belong; everywhere else, asking ends in a sentence.
"""

from collections.abc import Iterable

from hiqcache.sglang import asking, support


def register() -> None:
    """SGLang calls this in every process, before arguments are parsed."""
    support.register(asking.HOOKS)
    asking.take_engine_keywords()
    support.install(_serving)


def _serving() -> Iterable[support.Hook]:
    from hiqcache.sglang import cpu, hooks

    cpu.adapt()
    return hooks.HOOKS
