"""Experiments that ship with the package and need no weights."""
