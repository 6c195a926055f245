"""`hiqcache list`: the representations that `--hicache-representation` takes."""

import click


@click.command
def command() -> None:
    """List the host representations that are installed.

    A name is what `--hicache-representation` takes; a format names the bytes in host memory. Representations from
    other packages are listed too, a broken one with what is wrong with it.
    """
    from rich.table import Column

    from hiqcache import registry
    from hiqcache.commands._table import print_table
    from hiqcache.geometry import HiqcacheError

    def describe(name: str) -> tuple[str, str, str]:
        try:
            cls = registry.get(name)
        except HiqcacheError as error:
            return name, "-", f"unavailable: {' '.join(str(error).split())}"
        return name, cls.format_tag, cls.summary

    columns = [Column("name", no_wrap=True), Column("format", no_wrap=True), "summary"]
    print_table(columns, map(describe, registry.names()))
