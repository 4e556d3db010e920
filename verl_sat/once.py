"""Say something once in a process, not once per micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

_said: set[Hashable] = set()


def first_time(key: Hashable) -> bool:
    """Whether ``key`` is new in this process; it is not any more after this."""
    if key in _said:
        return False
    _said.add(key)
    return True


def warn_once(logger: logging.Logger, key: Hashable, message: str, *args: Any) -> None:
    """Log a warning, with the plugin's prefix, the first time that ``key`` comes from ``logger``.

    Args:
        logger: of the module that warns.
        key: what the warning is about.
        message: as for ``logger.warning``.
        *args: as for ``logger.warning``.
    """
    if first_time((logger.name, key)):
        logger.warning(f"verl-sat: {message}", *args)


def forget() -> None:
    """Start anew, for tests."""
    _said.clear()
