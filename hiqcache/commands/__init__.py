"""The commands, one module each; `hiqcache.__main__` says what makes a module a command."""
