"""Staleness-adaptive trust regions (SAT) for asynchronous RL post-training in verl.

This module holds the version and nothing else: the plugin is loaded in the middle of
``import verl``, so importing the package must never import verl.
"""

__version__ = "0.1.0"
