"""Whether a machine is ready to serve with hiqcache.

facts.py     observes; the only part that looks at the machine
checks.py    judges facts, and says what to do
"""
