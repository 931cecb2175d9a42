"""Offline batch inference of document pages, with the vision tower off the GPU."""

__version__ = "0.1.0"
