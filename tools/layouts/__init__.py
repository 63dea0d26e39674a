"""Layouts on the command line: their flags, their text and their picture."""
